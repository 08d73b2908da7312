"""Builder of routines (a graph's host steps): assigns values to registers, nodes to segments.

Device nodes are added to the open segment. Values that its nodes read become arguments, and values
that later steps read become results. Loads are placed before the segment and stores after it, so it
stays open until the host must wait for one of its values. Zeros and views are computed by every
segment that reads them, and take no memory between segments.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from popxl._schedule.index_arithmetic import host_scalar_constant
from popxl._schedule.schedule import Fetch, Register, Run, Step, Store
from popxl._schedule.segment import Segment
from popxl.tensor import Constant, TensorSpec

if TYPE_CHECKING:
    from popxl._analysis.functionalization import Node, Value


Labelled = TypeVar("Labelled", bound=Step)


class RegisterFile:
    """Virtual registers of a routine: numbered places of arrays and host scalars.

    Attributes:
        specs: spec of each array register.
        scalars: registers of host scalars.
        constants: numbers of constants.
        size: number of registers.
    """

    def __init__(self) -> None:
        self.specs: dict[Register, TensorSpec] = {}
        self.scalars: set[Register] = set()
        self.constants: dict[Register, int] = {}
        self.size = 0
        self._constants: dict[int, Register] = {}

    def new_scalar(self) -> Register:
        self.scalars.add(self.size)
        self.size += 1
        return self.size - 1

    def new_array(self, spec: TensorSpec) -> Register:
        self.specs[self.size] = TensorSpec(spec.shape, spec.dtype)
        self.size += 1
        return self.size - 1

    def constant(self, number: int) -> Register:
        if number not in self._constants:
            register = self._constants[number] = self.new_scalar()
            self.constants[register] = number
        return self._constants[number]


@dataclass(eq=False)
class _SegmentBuilder:
    """A segment (ops compiled together) under construction: its nodes, arguments and results.

    Attributes:
        args, results: registers of the values that it takes and returns.
        computed: values that its nodes make.
        pending_stores: stores that follow it.
        loaded_bytes, num_loads: of the loads before it.
        rounding_offset: random roundings before it.
        run: its step, once it is closed; later steps can still add results.
    """

    segment: Segment
    args: dict[Value, Register] = field(default_factory=dict)
    results: dict[Value, Register] = field(default_factory=dict)
    computed: set[Value] = field(default_factory=set)
    pending_stores: list[Store] = field(default_factory=list)
    loaded_bytes: int = 0
    num_loads: int = 0
    rounding_offset: int = 0
    run: Run | None = None


def set_step_label(step: Labelled, node: Node) -> Labelled:
    """Sets a step's region label and source location from a node, and returns the step."""
    step.part = node.part
    step.location = "" if node.op is None else node.op.location
    return step


class RoutineBuilder:
    """The host steps, registers and segments of one graph's routine under construction.

    Attributes:
        rounding_offset: random roundings so far.
    """

    def __init__(self, title: str, inputs: Sequence[Value], scalar_inputs: Iterable[int]) -> None:
        """Creates registers for the inputs and opens the first segment.

        Args:
            scalar_inputs: inputs that are numbers which the host knows.
        """
        self.title, self.registers = title, RegisterFile()
        self.steps: list[Step] = []
        self.rounding_offset = 0
        self._locations: dict[Value, Register | _SegmentBuilder] = {}
        self._closed_segments: list[_SegmentBuilder] = []
        self.open_segment = self._new_segment()
        numbers = set(scalar_inputs)
        for i, v in enumerate(inputs):
            self._locations[v] = (
                self.registers.new_scalar() if i in numbers else self.registers.new_array(v.spec)
            )

    def add_step(self, step: Step, node: Node) -> None:
        """Adds a host step with the label and location of a node."""
        self.steps.append(set_step_label(step, node))

    # ---- where values are -----------------------------------------------------------------------
    def bind(self, value: Value, register: Register) -> None:
        """Records that a value of the graph is in virtual register `register`."""
        self._locations[value] = register

    def scalar_register(self, value: Value) -> Register | None:
        """Returns the register of a host integer; None if the host does not know the value."""
        location = self._locations.get(value)
        if isinstance(location, int):
            return location if location in self.registers.scalars else None
        constant = None if location or value.node else host_scalar_constant(value.tensor)
        return None if constant is None else self.registers.constant(constant)

    def array_register(self, value: Value) -> Register:
        """Returns a register with a value's array, which the segment being built may compute."""
        location = self._locations.get(value)
        if isinstance(location, _SegmentBuilder):
            return self._segment_result(location, value)
        if location is not None and location not in self.registers.scalars:
            return location
        self.make_available(value)
        return self._segment_result(self.open_segment, value)

    def fetch_scalar(self, value: Value, node: Node) -> Register:
        """Adds a step that fetches an integer from the devices, and returns its register."""
        array = self.array_register(value)
        self.close_segment()
        number = self.registers.new_scalar()
        self.add_step(Fetch(value=array, out=number), node)
        return number

    def is_zeros(self, value: Value) -> bool:
        """True if a value of the graph is known to be zeros, which need no memory."""
        return value.node is not None and value.node.kind == "zeros"

    def _segment_result(self, segment_builder: _SegmentBuilder, value: Value) -> Register:
        if value not in segment_builder.results:
            segment_builder.results[value] = self.registers.new_array(value.spec)
        return segment_builder.results[value]

    # ---- the open segment -----------------------------------------------------------------------
    def make_available(self, value: Value) -> None:
        """Makes a value available in the segment being built, as an argument or recomputed."""
        stack = [(value, False)]  # views of views may be many: no recursion
        while stack:
            value, is_ready = stack.pop()
            if value in self.open_segment.computed or value in self.open_segment.args:
                continue
            location = self._locations.get(value)
            if location is not None:
                register = (
                    self._segment_result(location, value)
                    if isinstance(location, _SegmentBuilder)
                    else location
                )
                self.open_segment.args[value] = register
                continue
            node = value.node
            if node is None:
                assert isinstance(value.tensor, Constant), f"{value!r} has no value"
            elif is_ready:
                self._append_node(node)
            else:
                stack.append((value, True))
                stack += [(v, False) for v in node.inputs]

    def add_node(self, node: Node) -> None:
        """Adds a node to the segment (ops compiled together) that is being built."""
        for v in node.inputs:
            self.make_available(v)
        self._append_node(node)
        self._locations.update(dict.fromkeys(node.outputs, self.open_segment))

    def _append_node(self, node: Node) -> None:
        if not self.open_segment.segment.nodes:
            self.open_segment.rounding_offset = self.rounding_offset
        self.open_segment.segment.nodes.append(node)
        self.open_segment.computed.update(node.outputs)

    # ---- segments -------------------------------------------------------------------------------
    def _new_segment(self) -> _SegmentBuilder:
        return _SegmentBuilder(Segment(f"{self.title}.{len(self._closed_segments)}"))

    def close_segment(self) -> None:
        """Ends the segment being built, and adds the stores that wait for its results."""
        segment_builder = self.open_segment
        if segment_builder.segment.nodes or segment_builder.results:
            segment_builder.run = Run(
                segment=segment_builder.segment,
                args=(),
                rounding_offset=segment_builder.rounding_offset,
            )
            parts = {node.part for node in segment_builder.segment.nodes if node.kind == "op"}
            segment_builder.run.part = parts.pop() if len(parts) == 1 else ""
            ops = (node.op for node in segment_builder.segment.nodes if node.op is not None)
            segment_builder.run.location = next((op.location for op in ops), "")
            self._closed_segments.append(segment_builder)
            self.steps.append(segment_builder.run)
        self.open_segment = self._new_segment()
        self.steps += segment_builder.pending_stores

    def finish(self) -> None:
        """Ends the last segment, and sets the arguments and results of all segments."""
        self.close_segment()
        for segment_builder in self._closed_segments:
            assert segment_builder.run is not None
            segment = segment_builder.segment
            segment.args = list(segment_builder.args)
            segment.results = list(segment_builder.results)
            segment_builder.run.args = tuple(segment_builder.args.values())
            segment_builder.run.outs = tuple(segment_builder.results.values())
            segment.scalar_args = frozenset(
                i
                for i, register in enumerate(segment_builder.run.args)
                if register in self.registers.scalars
            )
