"""Running graphs while JAX traces a segment: values of tensors, and the state that persists.

`Machine` holds the state that ops of the segment touch by themselves: data and positions of host
streams, faults found, numbers of random roundings. `Frame` holds the values of one activation of
one graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from popxl._core.frame import ValueFrame
from popxl._core.text import first_line
from popxl._lower.hostdata import device_view
from popxl._lower.rounding import is_rounded
from popxl._lower.state import LoopState
from popxl.errors import popart_exception

if TYPE_CHECKING:
    from popxl._core.op import Op
    from popxl.graph import Graph
    from popxl.streams import Stream
    from popxl.tensor import Tensor


PART = "part"  # marks the labels of parts among the scopes that JAX knows ops by


@dataclass
class Machine:
    """State of the program while a segment is traced.

    Attributes:
        streams: data of each stream on this replica, (transfers, *shape).
        positions: the next transfer of each stream.
        constants: values of the constants that are arguments of the segment.
        checks: ops whose rules on values are checked, with a number from 1 for each.
        fault: number of the first op that broke its rule; 0: none did.
        seed: of the random numbers that updates of 16-bit variables are rounded with, uint32 (2,);
            None: they are rounded to nearest.
        updates: how many such updates there were before (see `rounding`).
    """

    streams: dict[Stream, jax.Array] = field(default_factory=dict)
    positions: dict[Stream, Any] = field(default_factory=dict)
    constants: dict[Tensor, jax.Array] = field(default_factory=dict)
    checks: Mapping[Op, int] = field(default_factory=dict)
    fault: Any = 0
    seed: Any = None
    updates: Any = 0

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

    # ---- loops ----------------------------------------------------------------------------------
    def loop_state(self, graphs: Sequence[Graph], count: int = 1) -> LoopState:
        """What a loop or branch must carry: see `LoopState`."""
        return LoopState(self, graphs, count)

    # ---- running --------------------------------------------------------------------------------
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

    def define(self, op: Op, results: Any) -> None:
        """As for every frame; one result may be given by itself."""
        super().define(op, _results(results))


def part_scope(part: str) -> AbstractContextManager[Any]:
    """Label what JAX traces inside as part of the program; "": leave the label as it is."""
    return jax.named_scope(f"{PART}<{part}>") if part else nullcontext()


def execute(frame: Frame, op: Op) -> None:
    """Run one op.

    Raises:
        popart_exception: with the op and the user's line, if what it means cannot be computed.
    """
    try:
        with jax.named_scope(op.name), part_scope(op.part):
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
