"""Permanent storage of a program: its variables, streams and remote buffers."""

from __future__ import annotations

import math
from collections.abc import Iterable

from popxl._analysis.effects import program_effects
from popxl.ir import Ir
from popxl.plan.records import Storage
from popxl.remote_buffer import RemoteBuffer
from popxl.streams import Stream


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
