"""Running a graph while JAX traces: values of tensors, and the state that persists.

`Machine` holds the program's state during a trace: remote buffers, stream data and positions.
`Frame` holds the values of one activation of one graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from popxl._core.aliases import owners
from popxl._core.frame import ValueFrame
from popxl._core.text import first_line
from popxl._lower.hostdata import device_view
from popxl._lower.loops import Loops
from popxl._lower.rounding import is_rounded
from popxl.errors import popart_exception

if TYPE_CHECKING:
    from popxl._core.op import Op
    from popxl.graph import Graph
    from popxl.remote_buffer import RemoteBuffer
    from popxl.streams import Stream
    from popxl.tensor import Tensor


@dataclass
class Machine:
    """State of the program being traced.

    Attributes:
        buffers: contents of each remote buffer on this replica, (entries, *stored entry shape).
        streams: data of each stream on this replica, (transfers, *shape).
        positions: the next transfer of each stream.
        constants: values of the constants that are arguments of the program.
        zero: an int32 scalar that is 0 at run time but unknown to the compiler.
        guard_reads: read written buffers through a condition on `zero` (see `load`).
        written: buffers that the program stores to.
        checks: ops whose rules on values are checked, with a number from 1 for each.
        fault: number of the first op that broke its rule; 0: none did.
        seed: of the random numbers that updates of 16-bit variables are rounded with, uint32 (2,);
            None: they are rounded to nearest.
        updates: how many such updates there were before (see `rounding`).
        loops: what the loops so far leave behind them (see `_lower/loops.py`).
    """

    buffers: dict[RemoteBuffer, jax.Array] = field(default_factory=dict)
    streams: dict[Stream, jax.Array] = field(default_factory=dict)
    positions: dict[Stream, Any] = field(default_factory=dict)
    constants: dict[Tensor, jax.Array] = field(default_factory=dict)
    zero: Any = None
    guard_reads: bool = False
    written: frozenset[RemoteBuffer] = frozenset()
    layout: Any = None
    checks: Mapping[Op, int] = field(default_factory=dict)
    fault: Any = 0
    seed: Any = None
    updates: Any = 0
    loops: Loops = field(default_factory=Loops)

    # ---- streams --------------------------------------------------------------------------------
    def next_position(self, stream: Stream) -> Any:
        at = self.positions[stream]
        self.positions[stream] = at + 1
        return at

    def host_load(self, stream: Stream) -> jax.Array:
        """The next transfer of a host-to-device stream."""
        data = self.streams[stream]
        return lax.dynamic_index_in_dim(data, self.next_position(stream), 0, keepdims=False)

    def host_store(self, stream: Stream, value: jax.Array) -> None:
        """Append to a device-to-host stream."""
        at = self.next_position(stream)
        self.streams[stream] = lax.dynamic_update_index_in_dim(self.streams[stream], value, at, 0)

    # ---- remote buffers -------------------------------------------------------------------------
    def load(self, buffer: RemoteBuffer, offset: Any) -> jax.Array:
        """Entry `offset` of a remote buffer, on the device.

        Slice first, then move: XLA's host offloading accepts nothing in between. On CPU, a buffer
        that is also stored to is read inside a conditional whose predicate is only known at run
        time: it materialises the entry, without which XLA copies the whole buffer for each store
        that follows. It also keeps the entry of a buffer of one apart from other loads of it, which
        XLA would make one, and keep from a phase's forward to its backward pass.
        """
        data = self.buffers[buffer]

        def read(data: jax.Array, at: Any) -> jax.Array:
            return lax.dynamic_index_in_dim(data, at, 0, keepdims=False)

        if self.guard_reads and buffer in self.written:
            shape, dtype = data.shape[1:], data.dtype

            def nothing(data: jax.Array, at: Any) -> jax.Array:
                return lax.full(shape, 0, dtype)

            entry = lax.cond(self.zero == 0, lambda d, i: self.to_device(read(d, i)),
                             nothing, data, offset)  # fmt: skip
        else:
            entry = self.to_device(read(data, offset))
        return self.layout.unpack(entry, buffer)

    def store(self, buffer: RemoteBuffer, offset: Any, value: jax.Array) -> None:
        """Overwrite entry `offset` of a remote buffer. Everything, then move, then update."""
        entry = self.to_host(self.layout.pack(value, buffer))
        at = self.loops.index_behind(buffer, offset)
        self.buffers[buffer] = lax.dynamic_update_index_in_dim(self.buffers[buffer], entry, at, 0)

    @staticmethod
    def to_device(x: jax.Array) -> jax.Array:
        return jax.device_put(x, jax.memory.Space.Device)

    @staticmethod
    def to_host(x: jax.Array) -> jax.Array:
        return jax.device_put(x, jax.memory.Space.Host)

    # ---- checks ---------------------------------------------------------------------------------
    def check(self, op: Op, inputs: Sequence[jax.Array]) -> None:
        """Note a fault if `op` has a rule on values and `inputs` break it."""
        if op in self.checks and op.defn.check is not None:
            broken = jnp.reshape(op.defn.check.broken(*inputs, **op.attrs), ())
            self.fault = jnp.where(broken & (self.fault == 0), self.checks[op], self.fault)

    @contextmanager
    def unchecked(self) -> Iterator[None]:
        """Check nothing inside."""
        checks, self.checks = self.checks, {}
        try:
            yield
        finally:
            self.checks = checks

    # ---- rounding -------------------------------------------------------------------------------
    def rounding(self, op: Op) -> dict[str, Any]:
        """The argument `rounding` of `op`, if it is an update that rounds at random."""
        if self.seed is None or not is_rounded(op):
            return {}
        number = self.updates
        self.updates = number + 1
        return {"rounding": (self.seed, number)}

    # ---- running --------------------------------------------------------------------------------
    def trips(self, count: int) -> Any:
        """How often a loop runs; None: once, without a loop.

        XLA takes loops of one iteration apart. On CPU, where it orders the kernels of each loop's
        body by themselves, that would mix the phases of a program and keep values of all of them
        alive; so there the number is known only at run time.
        """
        if count != 1:
            return count
        return count + self.zero if self.guard_reads else None

    def run(self, graph: Graph, inputs: Sequence[jax.Array]) -> Frame:
        """Run `graph` and return its frame, from which outputs and changed inputs can be read."""
        frame = Frame(self)
        frame.values.update(zip(graph._inputs, inputs, strict=True))
        for op in graph._ops:
            if not op.view:
                execute(frame, op)
        return frame


class Frame(ValueFrame[jax.Array]):
    """An activation while JAX traces it."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine

    def outer(self, t: Any) -> jax.Array:
        # Never cached: an array made while tracing a loop body must not be used outside it.
        given = self.machine.constants.get(t)
        return jnp.asarray(device_view(t._data)) if given is None else given

    def view(self, op: Op, inputs: Sequence[jax.Array]) -> jax.Array:
        assert op.defn.lower is not None
        return _results(op.defn.lower(*inputs, **op.attrs))[0]

    def write_through(
        self, op: Op, inputs: Sequence[jax.Array], value: jax.Array
    ) -> Sequence[jax.Array]:
        assert op.defn.view_write is not None, f"{op.name} has no rule to write through"
        return op.defn.view_write(tuple(inputs), value, **op.attrs)

    def write(self, t: Tensor, value: jax.Array) -> None:
        """As for every frame, but not before the loops that have read what is overwritten."""
        loops, holders = self.machine.loops, list(owners(t))
        behind = any(loops.has_read(self.values.get(o)) for o in holders)
        super().write(t, loops.value_behind(value, self.read(t)) if behind else value)
        if behind:
            for o in holders:
                loops.replaced(self.values[o])

    def define(self, op: Op, results: Any) -> None:
        """As for every frame; one result may be given by itself."""
        super().define(op, _results(results))


def execute(frame: Frame, op: Op) -> None:
    """Run one op.

    Raises:
        popart_exception: with the op and the user's line, if what it means cannot be computed.
    """
    try:
        with jax.named_scope(op.name):
            _execute(frame, op)
    except popart_exception:
        raise  # it is for the user already, or names an op of a called graph
    except Exception as error:
        raise popart_exception(
            f"graph {op.graph.id!r}: `{op}` ({op.location}) cannot be lowered to XLA: "
            f"{type(error).__name__}: {first_line(error)}"
        ) from error


def _execute(frame: Frame, op: Op) -> None:
    if op.defn.execute is None:
        assert op.defn.lower is not None
        inputs = list(map(frame.read, op.inputs))
        frame.machine.check(op, inputs)
        frame.define(op, op.defn.lower(*inputs, **op.attrs, **frame.machine.rounding(op)))
    elif op.called_graphs():
        op.defn.execute(frame, op)
    else:  # a gradient may run graphs again: they were checked when they were called
        with frame.machine.unchecked():
            op.defn.execute(frame, op)


def _results(result: Any) -> Sequence[jax.Array]:
    return result if isinstance(result, (tuple, list)) else [result]
