"""Values in slots, nodes in segments: what a routine is put together from.

Device nodes are added to the segment that is open. It takes arguments as its nodes read values that
it has not made, and gives as results what later steps ask for. Loads come before it and stores
after it, so it stays open until the host has to wait for one of its values. Zeros and what views
show are made by every segment that reads them, and take no memory between segments.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from popxl._schedule.index_arithmetic import host_constant
from popxl._schedule.schedule import Fetch, Run, Slot, Step, Store
from popxl._schedule.segment import Segment
from popxl.tensor import Constant, TensorSpec

if TYPE_CHECKING:
    from popxl._analysis.functionalization import Node, Value


Labelled = TypeVar("Labelled", bound=Step)


class Slots:
    """The slots of a routine.

    Attributes:
        specs: of arrays.
        numbers: slots of numbers that the host knows.
        start: numbers of constants.
        size: how many there are.
    """

    def __init__(self) -> None:
        self.specs: dict[Slot, TensorSpec] = {}
        self.numbers: set[Slot] = set()
        self.start: dict[Slot, int] = {}
        self.size = 0
        self._constants: dict[int, Slot] = {}

    def number(self) -> Slot:
        self.numbers.add(self.size)
        self.size += 1
        return self.size - 1

    def array(self, spec: TensorSpec) -> Slot:
        self.specs[self.size] = TensorSpec(spec.shape, spec.dtype)
        self.size += 1
        return self.size - 1

    def constant(self, number: int) -> Slot:
        if number not in self._constants:
            slot = self._constants[number] = self.number()
            self.start[slot] = number
        return self._constants[number]


@dataclass(eq=False)
class _Piece:
    """A segment under construction.

    Attributes:
        args, results: slots of the values that it takes and returns.
        made: values that its nodes make.
        waiting: stores that follow it.
        nbytes, entries: loaded for it.
        updates: random roundings before it.
        run: its step, once it is closed; it may still be asked for results.
    """

    segment: Segment
    args: dict[Value, Slot] = field(default_factory=dict)
    results: dict[Value, Slot] = field(default_factory=dict)
    made: set[Value] = field(default_factory=set)
    waiting: list[Store] = field(default_factory=list)
    nbytes: int = 0
    entries: int = 0
    updates: int = 0
    run: Run | None = None


def labelled(step: Labelled, node: Node) -> Labelled:
    """Give a step the part and the location of the op of a node."""
    step.part = node.part
    step.location = "" if node.op is None else node.op.location
    return step


class Assembly:
    """The steps of one routine, while they are made.

    Attributes:
        updates: random roundings so far.
    """

    def __init__(self, title: str, inputs: Sequence[Value], known: Iterable[int]) -> None:
        """
        Args:
            known: inputs that are numbers which the host knows.
        """
        self.title, self.slots = title, Slots()
        self.steps: list[Step] = []
        self.updates = 0
        self._where: dict[Value, Slot | _Piece] = {}
        self._closed: list[_Piece] = []
        self.open = self._new_piece()
        numbers = set(known)
        for i, v in enumerate(inputs):
            self._where[v] = self.slots.number() if i in numbers else self.slots.array(v.spec)

    def step(self, step: Step, node: Node) -> None:
        """Add what the host does for a node."""
        self.steps.append(labelled(step, node))

    # ---- where values are -----------------------------------------------------------------------
    def place(self, value: Value, slot: Slot) -> None:
        """Let a value be in `slot`."""
        self._where[value] = slot

    def number(self, value: Value) -> Slot | None:
        """The slot of a number that the host knows."""
        place = self._where.get(value)
        if isinstance(place, int):
            return place if place in self.slots.numbers else None
        constant = None if place or value.node else host_constant(value.tensor)
        return None if constant is None else self.slots.constant(constant)

    def array(self, value: Value) -> Slot:
        """A slot with the array of a value; it may be given it when the open segment has run."""
        place = self._where.get(value)
        if isinstance(place, _Piece):
            return self._result(place, value)
        if place is not None and place not in self.slots.numbers:
            return place
        self.read(value)
        return self._result(self.open, value)

    def fetched(self, value: Value, node: Node) -> Slot:
        """A number that only the devices know, fetched."""
        array = self.array(value)
        self.close()
        number = self.slots.number()
        self.step(Fetch(value=array, out=number), node)
        return number

    def is_zeros(self, value: Value) -> bool:
        """Whether a value is zeros, which nothing has to hold."""
        return value.node is not None and value.node.kind == "zeros"

    def _result(self, piece: _Piece, value: Value) -> Slot:
        if value not in piece.results:
            piece.results[value] = self.slots.array(value.spec)
        return piece.results[value]

    # ---- the open segment -----------------------------------------------------------------------
    def read(self, value: Value) -> None:
        """Let the open segment have a value."""
        waiting = [(value, False)]  # views of views may be many: no recursion
        while waiting:
            value, is_ready = waiting.pop()
            if value in self.open.made or value in self.open.args:
                continue
            place = self._where.get(value)
            if place is not None:
                slot = self._result(place, value) if isinstance(place, _Piece) else place
                self.open.args[value] = slot
                continue
            node = value.node
            if node is None:
                assert isinstance(value.tensor, Constant), f"{value!r} has no value"
            elif is_ready:
                self._add(node)
            else:
                waiting.append((value, True))
                waiting += [(v, False) for v in node.inputs]

    def run(self, node: Node) -> None:
        """Let the open segment run a node."""
        for v in node.inputs:
            self.read(v)
        self._add(node)
        self._where.update(dict.fromkeys(node.outputs, self.open))

    def _add(self, node: Node) -> None:
        if not self.open.segment.nodes:
            self.open.updates = self.updates
        self.open.segment.nodes.append(node)
        self.open.made.update(node.outputs)

    # ---- segments -------------------------------------------------------------------------------
    def _new_piece(self) -> _Piece:
        return _Piece(Segment(f"{self.title}.{len(self._closed)}"))

    def close(self) -> None:
        """Complete the open segment, and do what waits for it."""
        piece = self.open
        if piece.segment.nodes or piece.results:
            piece.run = Run(segment=piece.segment, args=(), updates=piece.updates)
            parts = {node.part for node in piece.segment.nodes if node.kind == "op"}
            piece.run.part = parts.pop() if len(parts) == 1 else ""
            ops = (node.op for node in piece.segment.nodes if node.op is not None)
            piece.run.location = next((op.location for op in ops), "")
            self._closed.append(piece)
            self.steps.append(piece.run)
        self.open = self._new_piece()
        self.steps += piece.waiting

    def finish(self) -> None:
        """Close, and give segments the results that were asked for."""
        self.close()
        for piece in self._closed:
            assert piece.run is not None
            segment = piece.segment
            segment.args, segment.results = list(piece.args), list(piece.results)
            piece.run.args = tuple(piece.args.values())
            piece.run.outs = tuple(piece.results.values())
            segment.numbers = frozenset(
                i for i, slot in enumerate(piece.run.args) if slot in self.slots.numbers
            )
