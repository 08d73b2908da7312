"""Properties of the devices that a program would run on."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax

from popxl._devices.host_memory import free_host_bytes as free_host_bytes
from popxl._devices.mesh import MAX_PINNED as MAX_PINNED
from popxl._devices.mesh import replica_mesh


def platform(device_desc: str) -> str:
    """Returns the platform of a device description: "cpu", "gpu" or "tpu".

    Raises:
        DeviceError: there is no device of it.
    """
    return replica_mesh(device_desc, 1).devices.flat[0].platform


def device_kinds(device_desc: str, replicas: int, instances: int = 1) -> list[str]:
    """Returns the kind of each replica's device, such as "NVIDIA H100 80GB HBM3" or "cpu".

    Args:
        device_desc: as for `popxl.Session`.
        instances: processes that share the replicas.

    Raises:
        DeviceError: there are fewer devices.
    """
    mesh = replica_mesh(device_desc, replicas, instances)
    return [device.device_kind for device in mesh.devices.flat]


def has_bfloat16(device_desc: str) -> bool:
    """True if the devices multiply bfloat16 at full rate: TPUs, and NVIDIA GPUs since Ampere.

    Raises:
        DeviceError: there is none of the platform.
    """
    device = replica_mesh(device_desc, 1).devices.flat[0]
    if device.platform == "gpu":
        return float(getattr(device, "compute_capability", 0.0)) >= 8.0
    return bool(device.platform == "tpu")


def peak_device_bytes(device_desc: str, replicas: int, instances: int = 1) -> int | None:
    """Returns the peak bytes in use on any of this process's devices; None if unknown.

    None where the platform does not tell, as on CPU.
    """
    return max(_memory_stats(device_desc, replicas, instances, "peak_bytes_in_use"), default=None)


def device_memory(device_desc: str, replicas: int, instances: int = 1) -> int | None:
    """Returns the usable bytes on each of `replicas` devices; None if they use host memory.

    Args:
        device_desc: as for `popxl.Session`.
        instances: processes that share the replicas.

    Raises:
        DeviceError: there are fewer devices.
    """
    return min(_memory_stats(device_desc, replicas, instances, "bytes_limit"), default=None)


def _memory_stats(device_desc: str, replicas: int, instances: int, name: str) -> list[int]:
    """Returns a memory statistic of this process's devices; none of those that use host memory."""
    devices = replica_mesh(device_desc, replicas, instances).local_devices
    stats = [device.memory_stats() or {} for device in devices if device.platform != "cpu"]
    return [device_stats[name] for device_stats in stats if device_stats.get(name)]


def profile_trace(folder: str | Path) -> AbstractContextManager[Any]:
    """Context that writes a profiler trace for TensorBoard or Perfetto into a folder.

    Calls of Python are not in it: they would take longer, and devices wait for them.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    return jax.profiler.trace(str(folder), profiler_options=options)


def device_count(device_desc: str) -> int:
    """Returns the number of this host's devices of a platform.

    A CPU has as many virtual devices as are requested; those that exist so far count.

    Raises:
        DeviceError: there is none.
    """
    return len(jax.local_devices(backend=platform(device_desc)))
