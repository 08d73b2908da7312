"""Local resources: device memory, and scratch files to measure a disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from popxl._devices.mesh import replica_mesh

if TYPE_CHECKING:
    from popxl._storage.scratch_files import ScratchFile


def device_memory(device_desc: str, replicas: int, instances: int = 1) -> int | None:
    """Returns the usable bytes on each of `replicas` devices; None if they use host memory.

    Args:
        device_desc: as for `popxl.Session`.
        instances: processes that share the replicas.

    Raises:
        DeviceError: there are fewer devices.
    """
    devices = replica_mesh(device_desc, replicas, instances).local_devices
    if devices[0].platform == "cpu":
        return None
    limits = [(d.memory_stats() or {}).get("bytes_limit") for d in devices]
    return min((limit for limit in limits if limit), default=None)


@contextmanager
def scratch_file(
    folder: str | os.PathLike[str], count: int, nbytes: int
) -> Iterator[tuple[ScratchFile, int]]:
    """Context with a temporary scratch file for disk measurements; yields it and its slot size.

    `file.write(i * slot, data)` and `file.read(i * slot, data)` are thread-safe.

    Args:
        count: number of entries.
        nbytes: bytes of an entry.

    Raises:
        DiskError: the folder is in use, or the disk is full.
    """
    from popxl._storage.scratch_files import ScratchFolder, padded_bytes

    scratch = ScratchFolder.open_shared(folder)
    file = scratch.create_file(count * padded_bytes(nbytes))
    try:
        yield file, padded_bytes(nbytes)
    finally:
        file.close()
        scratch.close()
