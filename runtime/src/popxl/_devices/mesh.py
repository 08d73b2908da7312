"""Device mesh of the replicas, shardings, and XLA's environment variables."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import popdist
from popxl._devices import cpu, forks
from popxl._devices.host_memory import free_host_bytes
from popxl.errors import DeviceError
from popxl.ops._collective import AXIS


def platform_of(device_desc: str) -> str:
    """Returns JAX's platform name for a PopXL device description.

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


def lowering_target(platform: str, device: Any) -> str:
    """Returns the target that programs are traced for: "cpu", "tpu", or such as "gpu 9.0".

    The number is the GPU's compute capability.
    """
    found = re.fullmatch(r"\d+\.\d+", str(getattr(device, "compute_capability", "")))
    return f"{platform} {found[0]}" if found else platform


def replica_mesh(device_desc: str, replicas: int, instances: int = 1) -> Mesh:
    """Returns a mesh with one device for each replica.

    Args:
        instances: processes that share the replicas equally, in order; with 1, this process alone.

    Raises:
        DeviceError: a process has fewer devices than its replicas, or none of the platform.
        DistributedError: the number of processes is not `instances`.
    """
    forks.check_not_forked()
    prepare_environment()
    if instances > 1:
        return _mesh_over_processes(device_desc, replicas, instances)
    cpu.request_devices(replicas)
    devices = _find_devices(device_desc, replicas, jax.local_devices)
    may_restart = devices[0].platform == "cpu" and jax.process_count() == 1
    if len(devices) < replicas and may_restart and not cpu.is_device_count_fixed():
        devices = cpu.restart_backend(replicas)
    if len(devices) < replicas:
        raise _too_few_devices_error(devices, replicas, "there are")
    return _mesh_of_devices(devices[:replicas])


def _mesh_over_processes(device_desc: str, replicas: int, instances: int) -> Mesh:
    """Returns the device mesh of a program that runs in several processes."""
    popdist.init()
    if popdist.getNumInstances() != instances or replicas % instances:
        raise popdist.DistributedError(
            f"the program has {replicas} replicas for {instances} processes, but there are "
            f"{popdist.getNumInstances()}: each process needs the same number of replicas"
        )
    replicas_per_process = replicas // instances
    cpu.request_devices(max(replicas_per_process, popdist.getNumLocalReplicas()))
    devices = _find_devices(device_desc, replicas, jax.devices)
    chosen: list[Any] = []
    for process in range(instances):
        local_devices = [d for d in devices if d.process_index == process]
        if len(local_devices) < replicas_per_process:
            raise _too_few_devices_error(
                local_devices,
                replicas_per_process,
                f"for process {process} of {instances} there are",
            )
        chosen += local_devices[:replicas_per_process]
    return _mesh_of_devices(chosen)


def _mesh_of_devices(devices: Sequence[Any]) -> Mesh:
    forks.mark_devices_used(devices)
    return Mesh(np.asarray(devices), (AXIS,))


def _find_devices(
    device_desc: str, replicas: int, list_devices: Callable[..., list[Any]]
) -> list[Any]:
    """Returns the devices of a platform; raises DeviceError if there are none."""
    platform = "cpu" if device_desc == "ipu_hw" else platform_of(device_desc)
    try:
        platform = platform_of(device_desc)
        return list_devices(backend=platform)
    except (RuntimeError, AssertionError) as error:  # JAX asserts that a platform starts
        raise DeviceError(
            f"the session needs {replicas} {platform} device(s), but JAX finds none: install the "
            f"JAX plugin for {platform}, use device_desc='cpu', or unset JAX_PLATFORMS",
            platform,
            replicas,
            num_available=0,
        ) from error


def _too_few_devices_error(devices: Sequence[Any], num_needed: int, available: str) -> DeviceError:
    platform = devices[0].platform if devices else "cpu"
    return DeviceError(
        f"the program has {num_needed} replicas, but {available} {len(devices)} {platform} "
        "device(s): lower data_parallel x tensor_parallel (the replication factor), or use a "
        "machine with more devices, or device_desc='cpu' for virtual ones",
        platform,
        num_needed,
        len(devices),
    )


def global_shape(replicas: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of the global array over all replicas' local arrays of `shape`.

    They are concatenated along axis 0; scalars become (replicas,).
    """
    return (replicas * shape[0], *shape[1:]) if shape else (replicas,)


def create_per_replica_sharding(mesh: Mesh, memory: str = "device") -> NamedSharding:
    """Returns the sharding of an array whose axis 0 is split over the replicas."""
    return NamedSharding(mesh, PartitionSpec(AXIS), memory_kind=memory)


def create_replicated_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of an array that each replica holds in full."""
    return NamedSharding(mesh, PartitionSpec(), memory_kind="device")


# ---- the environment ----------------------------------------------------------------------------
MEMORY_FRACTION = 0.92
"""Of a GPU's memory, what XLA takes for a program: contexts and libraries need the rest."""

MAX_PINNED = 0.95
"""Of the host's free memory, what programs of a GPU may keep entries in."""

_PATIENCE = "xla_cpu_collective_call_terminate_timeout_seconds"
_PINNED = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
_FRACTION, _OLD_FRACTION = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"


def prepare_environment() -> None:
    """Sets XLA's environment variables before a backend starts, unless the user has set them."""
    if _PINNED not in os.environ:  # the default, 64, is too small for the model state
        os.environ[_PINNED] = str(_pinned_memory_limit_gb())
    if _FRACTION not in os.environ and _OLD_FRACTION not in os.environ:
        os.environ[_FRACTION] = str(MEMORY_FRACTION)  # by default it is 0.75
    # Replicas of a large layer on few processors may reach a collective minutes apart. XLA would
    # end the process after 40 s.
    flags = os.environ.get("XLA_FLAGS", "")
    if _PATIENCE not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --{_PATIENCE}=1800".strip()


def _pinned_memory_limit_gb() -> int:
    """Returns the limit of pinned host memory in GiB.

    The pool doubles and never shrinks, so without a limit it could take all memory for a program
    that needs half.
    """
    free = free_host_bytes()
    if free is None:
        return 64  # XLA's default
    return max(1, int(MAX_PINNED * free / popdist.local_process_count() / 2**30))


def copy_array(x: jax.Array) -> jax.Array:
    """Returns a copy of an array, empty ones included, which JAX cannot shard."""
    if x.size:
        return jax.numpy.copy(x)
    return jax.make_array_from_callback(
        x.shape, x.sharding, lambda index: np.empty(x.shape, x.dtype)[index]
    )
