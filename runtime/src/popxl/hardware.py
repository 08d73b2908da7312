"""Properties of the devices that a program would run on."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax

from popxl._devices.host_memory import host_memory as host_memory
from popxl._devices.mesh import MAX_PINNED as MAX_PINNED
from popxl._devices.mesh import replica_mesh


def platform(device_desc: str) -> str:
    """The platform that a device description names: "cpu", "gpu" or "tpu".

    Raises:
        DeviceError: there is no device of it.
    """
    return replica_mesh(device_desc, 1).devices.flat[0].platform


def device_kinds(device_desc: str, replicas: int, instances: int = 1) -> list[str]:
    """The kind of each replica's device, such as "NVIDIA H100 80GB HBM3" or "cpu".

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
    """Most memory that any of the replicas' devices had in use so far, of those of this process.

    None where the platform does not tell, as on CPU.
    """
    devices = replica_mesh(device_desc, replicas, instances).local_devices
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in devices]
    return max((n for n in peaks if n), default=None)


def profile_trace(folder: str | Path) -> AbstractContextManager[Any]:
    """Write a trace of what runs in the context, for TensorBoard or Perfetto, into a folder.

    Calls of Python are not in it: they would take longer, and devices wait for them.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    return jax.profiler.trace(str(folder), profiler_options=options)


def device_count(device_desc: str) -> int:
    """Devices of the platform of a description that this host has. A CPU has as many virtual ones
    as are asked for; those that were made so far count.

    Raises:
        DeviceError: there is none.
    """
    return len(jax.local_devices(backend=platform(device_desc)))
