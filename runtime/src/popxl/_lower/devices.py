"""Which devices run the replicas, and the mesh they form."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import popdist
from popxl._core.log import logger
from popxl._lower.compile import prepare_environment
from popxl.errors import DeviceError
from popxl.ops._collective import AXIS

_epoch = 0


def backend_epoch() -> int:
    """Counts restarts of the CPU backend: what was compiled before one is void."""
    return _epoch


def platform_of(device_desc: str) -> str:
    """JAX platform of a device description.

    "cpu" and "ipu_model": CPU. "gpu", "tpu": that. "ipu_hw": the best platform present.

    Raises:
        ValueError: an unknown description.
    """
    if device_desc in ("cpu", "ipu_model"):
        return "cpu"
    if device_desc in ("gpu", "cuda", "tpu"):
        return "gpu" if device_desc == "cuda" else device_desc
    if device_desc == "ipu_hw":
        return jax.default_backend() if jax.default_backend() in ("gpu", "tpu") else "cpu"
    raise ValueError(
        f"unknown device_desc {device_desc!r}: use 'ipu_hw', 'ipu_model', 'cpu', 'gpu' or 'tpu'"
    )


def replica_mesh(device_desc: str, replicas: int, instances: int = 1) -> Mesh:
    """A mesh of one device for each replica.

    Args:
        instances: processes that share the replicas equally, in order; with 1, this process alone.

    Raises:
        DeviceError: a process has fewer devices than its replicas, or none of the platform.
        DistributedError: there are not so many processes.
    """
    prepare_environment()
    if instances > 1:
        return _mesh_over_processes(device_desc, replicas, instances)
    _make_cpu_devices(max(_processors(), replicas))
    devices = _devices(device_desc, replicas, jax.local_devices)
    may_restart = devices[0].platform == "cpu" and jax.process_count() == 1
    if len(devices) < replicas and may_restart and not _cpu_devices_are_given():
        devices = _restart_cpu(replicas)
    if len(devices) < replicas:
        raise _too_few(devices, replicas, "there are")
    return Mesh(np.asarray(devices[:replicas]), (AXIS,))


def _mesh_over_processes(device_desc: str, replicas: int, instances: int) -> Mesh:
    """The mesh of a program that all processes run."""
    popdist.init()
    if popdist.getNumInstances() != instances or replicas % instances:
        raise popdist.DistributedError(
            f"the program has {replicas} replicas for {instances} processes, but there are "
            f"{popdist.getNumInstances()}: each process needs the same number of replicas"
        )
    each = replicas // instances
    _make_cpu_devices(max(each, popdist.getNumLocalReplicas()))
    found = _devices(device_desc, replicas, jax.devices)
    chosen: list[Any] = []
    for process in range(instances):
        own = [d for d in found if d.process_index == process]
        if len(own) < each:
            raise _too_few(own, each, f"for process {process} of {instances} there are")
        chosen += own[:each]
    return Mesh(np.asarray(chosen), (AXIS,))


def _devices(device_desc: str, replicas: int, find: Callable[..., list[Any]]) -> list[Any]:
    """The devices of a platform, of which there is at least one."""
    platform = platform_of(device_desc)
    try:
        return find(backend=platform)
    except RuntimeError as error:
        raise DeviceError(
            f"the session needs {replicas} {platform} device(s), but JAX finds none: install the "
            f"JAX plugin for {platform}, or use device_desc='cpu'",
            platform,
            replicas,
            found=0,
        ) from error


def _too_few(devices: Sequence[Any], needed: int, there_are: str) -> DeviceError:
    platform = devices[0].platform if devices else "cpu"
    return DeviceError(
        f"the program has {needed} replicas, but {there_are} {len(devices)} {platform} "
        "device(s): lower data_parallel x tensor_parallel (the replication factor), or use a "
        "machine with more devices, or device_desc='cpu' for virtual ones",
        platform,
        needed,
        len(devices),
    )


def _processors() -> int:
    """Processors this process may use, at most 64.

    That many virtual devices are made at start. XLA has a thread for each processor or, if there
    are more, for each device, whether a program uses it or not: with more threads than processors
    a large product takes up to three times as long. More are made when a program needs them.
    """
    if hasattr(os, "sched_getaffinity"):
        return min(len(os.sched_getaffinity(0)), 64)
    return min(os.cpu_count() or 1, 64)


def _cpu_devices_are_given() -> bool:
    """Whether the user has set the number of virtual CPU devices; then it stays."""
    return "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")


def _make_cpu_devices(count: int) -> None:
    """Ask for virtual CPU devices; has an effect only before the first backend use."""
    if _cpu_devices_are_given():
        return
    try:
        if jax.config.jax_num_cpu_devices < count:
            jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        pass  # the backend runs already


def _restart_cpu(count: int) -> list[Any]:
    """Start the CPU backend anew with more devices; compiled programs are rebuilt on next use."""
    global _epoch
    from jax.extend import backend

    for array in jax.live_arrays():  # the backend must not go while it computes
        array.block_until_ready()
    logger.info("restarting the CPU backend with %d virtual devices", count)
    backend.clear_backends()
    _epoch += 1
    jax.config.update("jax_num_cpu_devices", count)
    return jax.devices("cpu")


def two_memories(platform: str) -> bool:
    """Whether devices have memory of their own: on CPU a load of an entry is no copy."""
    return platform != "cpu"


def global_shape(replicas: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of an array of which each replica has a part of `shape`: the parts one after the other
    along the first axis, so that a replica's part is just its value; numbers side by side."""
    return (replicas * shape[0], *shape[1:]) if shape else (replicas,)


def per_replica(mesh: Mesh, host: bool = False) -> NamedSharding:
    """Sharding of an array whose first axis is divided among the replicas."""
    return NamedSharding(mesh, PartitionSpec(AXIS), memory_kind="pinned_host" if host else "device")


def replicated(mesh: Mesh) -> NamedSharding:
    """Sharding of an array that each replica has whole."""
    return NamedSharding(mesh, PartitionSpec(), memory_kind="device")
