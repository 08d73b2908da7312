"""Values in slots, ops in segments: what a routine is put together from.

Device ops are added to the segment that is open. It takes arguments as its ops read values that it
has not made, and gives as results what later steps ask for. Loads come before it and stores after
it, so it stays open until the host has to wait for one of its values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from popxl._core.aliases import owners
from popxl._lower.hostside import host_constant
from popxl._lower.schedule import Fetch, Run, Slot, Step, Store
from popxl._lower.segment import (
    Bind,
    Capture,
    Item,
    Name,
    RunOp,
    Scope,
    Segment,
    Write,
    Zeros,
)
from popxl.tensor import Constant, TensorSpec

if TYPE_CHECKING:
    from popxl._core.op import Op
    from popxl.graph import Graph
    from popxl.tensor import Tensor


@dataclass(eq=False)
class _Open:
    """The segment to which device ops are added.

    Attributes:
        defines: owners that it has given values.
        waiting: stores that follow it.
        nbytes: of entries loaded for it.
        updates: random roundings before it.
    """

    segment: Segment
    args: dict[Name | Slot, Slot] = field(default_factory=dict)
    defines: dict[Name, None] = field(default_factory=dict)
    captured: list[Slot] = field(default_factory=list)
    waiting: list[Store] = field(default_factory=list)
    nbytes: int = 0
    updates: int = 0


@dataclass(eq=False)
class _Closed:
    """A segment that is complete but for the results that later steps will ask for."""

    run: Run
    open: _Open
    results: dict[Name, Slot] = field(default_factory=dict)


class _Zero:
    """Where tensors of zeros are that nothing has read: each segment that reads one makes it."""


ZERO = _Zero()


class Assembly:
    """The steps of one routine, while they are made."""

    def __init__(
        self, graph: Graph, inputs: Sequence[Tensor], known: set[int], zeros: Sequence[Tensor] = ()
    ) -> None:
        """
        Args:
            known: inputs that are numbers which the host knows.
            zeros: further inputs of the graph that are zeros, and not passed.
        """
        self.graph, self.scope = graph, Scope(graph)
        self._title = f"{graph.id}.from_zeros" if zeros else graph.id
        self.steps: list[Step] = []
        self.specs: dict[Slot, TensorSpec] = {}
        self.start: dict[Slot, int] = {}
        self.numbers: set[Slot] = set()  # slots of numbers that the host knows
        self._size = 0
        self._closed: list[_Closed] = []
        self._where: dict[Name, Slot | _Closed | _Open | _Zero] = {
            (self.scope, t): ZERO for t in zeros
        }
        self._constants: dict[int, Slot] = {}
        self._updates = 0  # random roundings so far
        self._part = ""  # of the call that is inlined
        self._open = self._new_segment()
        self._input_slots: list[Slot] = []
        for i, t in enumerate(inputs):
            slot = self.new_number() if i in known else self.new_array(t.spec)
            self._where[self.scope, t] = slot
            self._input_slots.append(slot)

    # ---- slots ----------------------------------------------------------------------------------
    def new_number(self) -> Slot:
        slot = self._size
        self._size += 1
        self.numbers.add(slot)
        return slot

    def new_array(self, spec: TensorSpec) -> Slot:
        slot = self._size
        self._size += 1
        self.specs[slot] = TensorSpec(spec.shape, spec.dtype)
        return slot

    def constant(self, number: int) -> Slot:
        if number not in self._constants:
            slot = self._constants[number] = self.new_number()
            self.start[slot] = number
        return self._constants[number]

    def _step(self, step: Step, op: Op | None) -> None:
        if op is not None:
            step.part = op.part or self._part
        self.steps.append(step)

    # ---- where values are -----------------------------------------------------------------------
    def _number(self, scope: Scope, t: Tensor) -> Slot | None:
        """The slot of a number that the host knows."""
        found = self._where.get((scope, t))
        if isinstance(found, int):
            return found if found in self.numbers else None
        constant = host_constant(t) if found is None else None
        return None if constant is None else self.constant(constant)

    def _slot(self, scope: Scope, t: Tensor) -> Slot | None:
        """The slot that holds the value of `t` now; None if only a segment can give it."""
        owner = self._whole(t)
        if owner is None:
            return None
        found = self._where.get((scope, owner))
        if isinstance(found, _Closed):
            return self._result(found, (scope, owner))
        if isinstance(found, (_Open, _Zero)):
            return None
        return self._number(scope, owner) if found is None else found

    def _is_zero(self, scope: Scope, t: Tensor) -> bool:
        """Whether `t` is all of a tensor of zeros that nothing has read."""
        owner = self._whole(t)
        return owner is not None and self._where.get((scope, owner)) is ZERO

    @staticmethod
    def _whole(t: Tensor) -> Tensor | None:
        """The tensor whose memory `t` is, under the same shape; None if it is a view of part."""
        while (op := t._producer) is not None and op.outputs[0] is t:
            if op.inplace is None:
                return None if op.view else t
            t = op.inputs[op.inplace]
        return t

    def _result(self, closed: _Closed, name: Name) -> Slot:
        if name not in closed.results:
            closed.results[name] = self.new_array(name[1].spec)
        return closed.results[name]

    def _array(self, scope: Scope, t: Tensor) -> Slot:
        """A slot with the array of `t`; it may be given its value when the open segment has run."""
        slot = self._slot(scope, t)
        return self._captured(scope, t) if slot is None or slot in self.numbers else slot

    def _fetched(self, scope: Scope, t: Tensor, op: Op) -> Slot:
        """A number that only the devices know, fetched."""
        array = self._array(scope, t)
        self.close()
        number = self.new_number()
        self._step(Fetch(value=array, out=number), op)
        return number

    def _captured(self, scope: Scope, t: Tensor) -> Slot:
        self._read(scope, t)
        segment = self._open.segment
        self._add(Capture(scope, t, len(segment.captures)))
        segment.captures.append(TensorSpec(t.shape, t.dtype))
        slot = self.new_array(t.spec)
        self._open.captured.append(slot)
        return slot

    def _add(self, item: Item) -> None:
        """Add to the open segment."""
        if not self._open.segment.items:
            self._open.updates = self._updates
        self._open.segment.items.append(item)

    def _read(self, scope: Scope, t: Tensor) -> None:
        """Let the open segment read `t`."""
        for owner in owners(t):
            name = scope, owner
            if name in self._open.defines or name in self._open.args:
                continue
            found = self._where.get(name)
            if found is None:
                assert isinstance(owner, Constant), f"{owner!r} has no value"
                continue
            assert not isinstance(found, _Open)
            if isinstance(found, _Zero):
                self._add(Zeros(*name))
                self._defined(scope, [owner])
                continue
            slot = self._result(found, name) if isinstance(found, _Closed) else found
            self._open.args[name] = slot

    def _defined(self, scope: Scope, tensors: Iterable[Tensor]) -> None:
        for t in tensors:
            self._open.defines[scope, t] = None
            self._where[scope, t] = self._open

    def _bind(self, to: Name, source: Name) -> None:
        slot = self._slot(*source)
        if slot is not None:
            self._where[to] = slot
            return
        self._read(*source)
        self._add(Bind(to, source))
        self._defined(to[0], [to[1]])

    def _assign(self, scope: Scope, t: Tensor, slot: Slot) -> None:
        """Let `t`, and all that it is a view of, have the array in `slot`."""
        touched = [(scope, o) for o in owners(t)]
        if any(n in self._open.args or n in self._open.defines for n in touched):
            self.close()
        if len(touched) == 1 and self._whole(t) is not None:
            self._where[touched[0]] = slot
            return
        self._read(scope, t)
        self._open.args[slot] = slot
        self._add(Write(scope, t, slot))
        self._defined(scope, owners(t))

    # ---- segments -------------------------------------------------------------------------------
    def _new_segment(self) -> _Open:
        return _Open(Segment(f"{self._title}.{len(self._closed)}"))

    def close(self) -> None:
        """Complete the open segment, and do what waits for it."""
        opened = self._open
        self._open = self._new_segment()
        if opened.segment.items:
            run = Run(
                segment=opened.segment, args=tuple(opened.args.values()), updates=opened.updates
            )
            parts = {item.part for item in opened.segment.items if isinstance(item, RunOp)}
            run.part = parts.pop() if len(parts) == 1 else ""
            closed = _Closed(run, opened)
            self._closed.append(closed)
            self._where.update(dict.fromkeys(opened.defines, closed))
            self.steps.append(run)
            self._open.segment.name = f"{self._title}.{len(self._closed)}"
        self.steps += opened.waiting

    def _finish_segments(self) -> None:
        """Give segments the results that were asked for."""
        for closed in self._closed:
            segment, opened = closed.open.segment, closed.open
            segment.args = list(opened.args)
            segment.numbers = frozenset(
                i for i, slot in enumerate(closed.run.args) if slot in self.numbers
            )
            segment.arg_specs = [
                self.specs[slot] if isinstance(name, int) else _plain(name[1])
                for name, slot in opened.args.items()
            ]
            segment.results = list(closed.results)
            closed.run.outs = (*opened.captured, *closed.results.values())


def _plain(t: Tensor) -> TensorSpec:
    return TensorSpec(t.shape, t.dtype)
