"""Permanent storage of a program: its variables, streams and remote buffers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from popxl._analysis.effects import program_effects
from popxl.ir import Ir
from popxl.remote_buffer import RemoteBuffer
from popxl.streams import Stream


@dataclass(frozen=True, kw_only=True)
class Storage:
    """Permanent storage of a program, in bytes of one replica.

    Attributes:
        variables: device bytes of variables and large constants that live on the device.
        streams: device bytes of host streams: all transfers of a run, in both directions.
        remote: host bytes of remote buffers, as they are stored; without entries on disk.
        disk: bytes of the entries on disk.
        resident: device bytes of entries of remote buffers on the device; part of `variables`.
    """

    variables: int
    streams: int
    remote: int
    disk: int = 0
    resident: int = 0

    @property
    def fixed_device_bytes(self) -> int:
        """Device bytes that are neither entries of remote buffers nor intermediate values."""
        return self.variables - self.resident + self.streams


def storage_of(ir: Ir) -> Storage:
    """Returns the bytes that the program of `ir` stores permanently, without tracing it."""
    effects = program_effects(ir)
    on_device = ir.main_graph._device_tensors
    constants = {
        c._content_key: c
        for graph in ir._graphs
        for c in graph.constants
        if c._is_executable_argument
    }
    buffers = list(_used_buffers(ir))
    resident = sum(_entry_bytes(b) * len(b.resident_entries) for b in buffers)
    on_disk = sum(_entry_bytes(b) * len(b.on_disk_entries) for b in buffers)
    return Storage(
        variables=sum(
            _array_bytes(t.shape, t.dtype.itemsize) for t in (*on_device, *constants.values())
        )
        + resident,
        streams=ir.num_host_transfers * _stream_bytes([*effects.loads, *effects.stores]),
        remote=sum(_entry_bytes(b) * b.entries for b in buffers) - resident - on_disk,
        disk=on_disk,
        resident=resident,
    )


def _used_buffers(ir: Ir) -> Iterable[RemoteBuffer]:
    """Yields the remote buffers that the program uses or that store variables."""
    effects = program_effects(ir)
    used = {*effects.reads, *effects.writes}
    return (b for b in ir._buffers if b in used or b._variables)


def _entry_bytes(buffer: RemoteBuffer) -> int:
    return _array_bytes(buffer.tensor_shape, buffer.tensor_dtype.itemsize)


def _stream_bytes(streams: Iterable[Stream]) -> int:
    return sum(_array_bytes(s.shape, s.dtype.itemsize) for s in streams)


def _array_bytes(shape: tuple[int, ...], itemsize: int) -> int:
    return math.prod(shape) * itemsize
