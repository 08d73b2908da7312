"""Builder of schedules: assigns nodes to the host or to segments that run on the devices.

Device nodes between host nodes are grouped into segments: loads are placed before the open segment,
stores after it. A segment is closed only where the host must wait for it, where a buffer is loaded
from after a store to it, or where its loads reach `_MAX_LOADED_BYTES` or `_MAX_LOADED_ENTRIES`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from popxl._analysis.functionalization import count_stochastic_roundings, functionalize
from popxl._analysis.memo import Memo
from popxl._ir.regions import regions
from popxl._schedule.buffer_donation import donate, mark_entry_copies
from popxl._schedule.control_flow import ControlFlow
from popxl._schedule.index_arithmetic import host_scalar_function, is_host_scalar_spec
from popxl._schedule.inlining import Inliner, is_outlined_call
from popxl._schedule.routine_builder import RoutineBuilder, set_step_label
from popxl._schedule.schedule import Compute, Load, Register, Routine, Run, Schedule, Store
from popxl._schedule.schedule_walk import routines_by_part
from popxl.ops.remote import REMOTE_LOAD, REMOTE_STORE

if TYPE_CHECKING:
    from popxl._analysis.functionalization import FunctionalGraph, Node, Value
    from popxl.ir import Ir
    from popxl.remote_buffer import RemoteBuffer

_MAX_LOADED_BYTES = 32 * 2**20  # of entries loaded for one segment
_MAX_LOADED_ENTRIES = (
    256  # that are loaded for one segment: XLA's time grows with the square of arguments
)


def build_schedule(ir: Ir) -> Schedule:
    """Returns the schedule of the program of `ir`.

    Raises:
        ValueError: it reads an input of the main graph.
    """
    _check_inputs(ir)
    graph = functionalize(ir.main_graph)
    main = _ScheduleBuilder().get_routine(graph, frozenset(), range(len(graph.outputs)))
    routines = list(dict.fromkeys(routine for routine, _ in routines_by_part(main)))
    mark_entry_copies(routines)
    runs = [step for r in routines for step in r.steps if isinstance(step, Run)]
    return Schedule(graph, main, routines, [run.segment for run in runs])


def _check_inputs(ir: Ir) -> None:
    main = ir.main_graph
    read = {t for op in main._ops for t in op.inputs}
    for t in main._inputs:
        if t in read:
            raise ValueError(
                f"the program reads {t.id!r}, an input of the main graph, which nothing calls, so "
                "it has no value: make it a variable, a constant or a host_load"
            )


class _ScheduleBuilder:
    """Builds and caches the routine (host steps) of each graph, by graph and kinds of arguments."""

    def __init__(self) -> None:
        self.routines: dict[Any, Routine] = {}
        self.inline = Inliner()
        self._memo = Memo()

    def get_routine(
        self,
        graph: FunctionalGraph,
        scalar_inputs: frozenset[int],
        arrays: Iterable[int],
        zeros: Sequence[int] = (),
    ) -> Routine:
        """Returns the routine (host steps) of a graph, built on first use.

        Args:
            scalar_inputs: inputs that are numbers which the host knows.
            arrays: outputs that have to be arrays.
            zeros: inputs that are zeros, and not passed.
        """
        key = graph, scalar_inputs, frozenset(arrays), tuple(zeros)
        return self._memo.get_or_compute(
            self.routines, key, lambda: _GraphScheduler(self, *key).build()
        )


class _GraphScheduler:
    """Builds the routine (host steps) of one graph."""

    def __init__(
        self,
        program: _ScheduleBuilder,
        graph: FunctionalGraph,
        scalar_inputs: frozenset[int],
        arrays: frozenset[int],
        zeros: tuple[int, ...],
    ) -> None:
        self._has_steps = graph.has_host_nodes
        self._donatable_inputs = _donatable_inputs(graph)
        title = f"{graph.graph.id}.first" if zeros else graph.graph.id
        if self._has_steps:
            graph = program.inline(graph)
        if zeros:
            passed_inputs = [i for i in range(len(graph.inputs)) if i not in zeros]
            scalar_inputs = frozenset(passed_inputs.index(i) for i in scalar_inputs)
            self._donatable_inputs = {
                k for k, i in enumerate(passed_inputs) if i in self._donatable_inputs
            }
            graph = graph.with_zero_inputs(zeros)
        self._graph, self._arrays = graph, arrays
        self._builder = RoutineBuilder(title, graph.inputs, scalar_inputs)
        self._inputs = tuple(range(len(graph.inputs)))  # the first registers
        self._control_flow = ControlFlow(self._builder, program.get_routine)

    # ---- routine --------------------------------------------------------------------------------
    def build(self) -> Routine:
        builder = self._builder
        self._schedule_nodes()
        outputs = [self._output_register(k, v) for k, v in enumerate(self._graph.outputs)]
        builder.finish()
        registers = builder.registers
        routine = Routine(
            title=builder.title,
            inputs=self._inputs,
            outputs=tuple(outputs),
            steps=builder.steps,
            constants=registers.constants,
            specs=registers.specs,
            num_registers=registers.size,
        )
        donate(routine, self._donatable_inputs)
        return routine

    def _output_register(self, index: int, value: Value) -> Register:
        number = None if index in self._arrays else self._builder.scalar_register(value)
        return self._builder.array_register(value) if number is None else number

    # ---- nodes ----------------------------------------------------------------------------------
    def _schedule_nodes(self) -> None:
        for node in self._graph.nodes:
            if node.is_rematerialized or (self._has_steps and self._compute_on_host(node)):
                continue
            if node.is_on_host:
                self._schedule_host_node(node)
            else:
                self._builder.add_node(node)
            self._builder.rounding_offset += count_stochastic_roundings(node)

    def _schedule_host_node(self, node: Node) -> None:
        if node.op is not None and node.op.defn is REMOTE_LOAD:
            self._add_load(node)
        elif node.op is not None and node.op.defn is REMOTE_STORE:
            self._add_store(node)
        elif node.regions[0].kind == "branch":
            self._control_flow.add_branch(node)
        elif node.callee is None or node.callee.has_host_nodes:
            self._control_flow.add_loop(node)
        else:
            self._run_outlined_call(node)

    def _compute_on_host(self, node: Node) -> bool:
        """Adds a host step that computes a node on integers, if the host knows all inputs.

        Returns False if that is impossible.
        """
        if node.op is None or node.kind != "op" or not all(
            is_host_scalar_spec(v.spec) for v in node.outputs
        ):  # fmt: skip
            return False
        rule = host_scalar_function(node.op)
        ins = [self._builder.scalar_register(v) for v in node.inputs]
        if rule is None or None in ins:
            return False
        outs = [self._builder.registers.new_scalar() for _ in node.outputs]
        step = Compute(
            name=node.op.defn.name, rule=rule, ins=tuple(ins), outs=tuple(outs)  # type: ignore[arg-type]
        )  # fmt: skip
        self._builder.add_step(step, node)
        for v, register in zip(node.outputs, outs, strict=True):
            self._builder.bind(v, register)
        return True

    # ---- transfers ------------------------------------------------------------------------------
    def _index_register(self, node: Node, input_index: int) -> Register:
        if node.attrs["offset"] is not None:
            return self._builder.registers.constant(node.attrs["offset"])
        value = node.inputs[input_index]
        register = self._builder.scalar_register(value)
        return self._builder.fetch_scalar(value, node) if register is None else register

    def _has_pending_store(self, buffer: RemoteBuffer) -> bool:
        return any(store.buffer is buffer for store in self._builder.open_segment.pending_stores)

    def _limit_segment_loads(self, buffer: RemoteBuffer) -> None:
        """Ends the segment being built if it has loaded its maximum number of entries."""
        nbytes = math.prod(buffer.tensor_shape) * buffer.tensor_dtype.itemsize
        segment_builder = self._builder.open_segment
        is_full = (
            segment_builder.loaded_bytes + nbytes > _MAX_LOADED_BYTES
            or segment_builder.num_loads >= _MAX_LOADED_ENTRIES
        )
        if segment_builder.segment.nodes and is_full:
            self._builder.close_segment()
        self._builder.open_segment.loaded_bytes += nbytes
        self._builder.open_segment.num_loads += 1

    def _add_load(self, node: Node) -> None:
        buffer, (value,) = node.attrs["buffer"], node.outputs
        entry_index = self._index_register(
            node, len(node.inputs) - 1
        )  # before it, what is overwritten
        if self._has_pending_store(buffer):
            self._builder.close_segment()
        self._limit_segment_loads(buffer)
        out = self._builder.registers.new_array(value.spec)
        self._builder.add_step(Load(out=out, buffer=buffer, entry_index=entry_index), node)
        self._builder.bind(value, out)

    def _add_store(self, node: Node) -> None:
        buffer = node.attrs["buffer"]
        entry_index = self._index_register(node, 1)
        register = self._builder.array_register(node.inputs[0])
        store = set_step_label(Store(value=register, buffer=buffer, entry_index=entry_index), node)
        segment_builder = self._builder.open_segment
        if register in segment_builder.results.values() or self._has_pending_store(buffer):
            segment_builder.pending_stores.append(store)
        else:
            self._builder.steps.append(store)

    # ---- outlined graphs ------------------------------------------------------------------------
    def _run_outlined_call(self, node: Node) -> None:
        """Adds a call of a separately compiled graph, to a segment without another such call."""
        if any(map(is_outlined_call, self._builder.open_segment.segment.nodes)):
            self._builder.close_segment()
        self._builder.add_node(node)


def _donatable_inputs(graph: FunctionalGraph) -> set[int]:
    """Returns the graph inputs that callers can donate: those modified or carried by a loop."""
    if graph.is_branch:
        return set()
    donatable_inputs = set(graph.changed)
    for site in graph.graph._call_sites:
        for region in regions(site):
            if region.graph is graph.graph and region.kind == "always":
                donatable_inputs |= {i for _, i in region.carried}
                donatable_inputs |= {
                    i for i, position in enumerate(region.inputs) if position in site.site_modified
                }
    return donatable_inputs
