"""The plan of a program, from its Ir alone."""

from __future__ import annotations

import math
from collections.abc import Iterable

from popxl._core.effects import program_effects
from popxl._lower.layout import Layout
from popxl._lower.program import is_argument
from popxl.ir import Ir
from popxl.plan.hoist import hoist
from popxl.plan.liveness import peaks
from popxl.plan.merge import merge
from popxl.plan.prune import prune
from popxl.plan.records import Plan, Storage
from popxl.plan.tally import Tally
from popxl.plan.trace import trace
from popxl.remote_buffer import RemoteBuffer
from popxl.streams import Stream


def plan_of(ir: Ir, tiled: bool = False) -> Plan:
    """What a run of the program of `ir` needs and does.

    It needs no devices and allocates neither weights nor state. Memory of intermediate values is
    found from when each is made and last read, in the order in which XLA runs kernels, and from
    which of them XLA computes where they are used (`popxl.plan.fusion`, `popxl.plan.order`).

    Args:
        tiled: count remote buffers as they are stored on TPU, in whole tiles.

    Example:
        >>> plan = popxl.plan.plan_of(ir)
        >>> print(plan.host, plan.device, plan.flops)
    """
    program = trace(ir)
    merge(program)
    prune(program)
    tally = Tally()
    tally.add(program)
    hoist(program)
    live = peaks(program)
    stored = storage_of(ir, tiled)
    return Plan(
        replicas=ir.replication_factor,
        parts=tally.parts(live.parts),
        variables=stored.variables,
        streams=stored.streams,
        temporaries=live.total,
        remote=stored.remote,
    )


def storage_of(ir: Ir, tiled: bool = False) -> Storage:
    """What the program of `ir` stores as long as it is there: the quick part of `plan_of`."""
    effects = program_effects(ir)
    on_device = [v for v in ir.main_graph.variables if v._remote is None]
    constants = [c for graph in ir._graphs for c in graph.constants if is_argument(c)]
    return Storage(
        variables=sum(_bytes(t.shape, t.dtype.itemsize) for t in (*on_device, *constants)),
        streams=ir.num_host_transfers * _stream_bytes([*effects.loads, *effects.stores]),
        remote=sum(_stored(b, Layout(tiled)) for b in _buffers(ir)),
    )


def _buffers(ir: Ir) -> Iterable[RemoteBuffer]:
    """The buffers that the program uses or that variables live in."""
    effects = program_effects(ir)
    used = {*effects.reads, *effects.writes}
    return (b for b in ir._buffers if b in used or b._variables)


def _stored(buffer: RemoteBuffer, layout: Layout) -> int:
    shape = layout.stored_shape(buffer)
    return buffer.entries * _bytes(shape, buffer.tensor_dtype.itemsize)


def _stream_bytes(streams: Iterable[Stream]) -> int:
    return sum(_bytes(s.shape, s.dtype.itemsize) for s in streams)


def _bytes(shape: tuple[int, ...], itemsize: int) -> int:
    return math.prod(shape) * itemsize
