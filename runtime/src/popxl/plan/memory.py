"""Memory that is there."""

from __future__ import annotations

from popxl._lower.devices import replica_mesh


def device_memory(device_desc: str, replicas: int, instances: int = 1) -> int | None:
    """Bytes that a program may use on each of `replicas` devices; None if that is host memory.

    Args:
        device_desc: as for `popxl.Session`.
        instances: processes that share the replicas.

    Raises:
        DeviceError: there are fewer devices.
    """
    devices = replica_mesh(device_desc, replicas, instances).local_devices
    if devices[0].platform == "cpu":
        return None
    found = [(d.memory_stats() or {}).get("bytes_limit") for d in devices]
    return min((limit for limit in found if limit), default=None)
