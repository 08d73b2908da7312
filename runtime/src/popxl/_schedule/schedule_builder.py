"""From graphs to schedules: which ops the host does, and how the rest is cut into segments.

Device nodes between host-executed ones are grouped: a load moves in front of the open segment, a
store waits until it is closed. So a segment is closed only where the host has to wait for it, where
a buffer is loaded from after it was stored to, or where `_BYTES` or `_ENTRIES` were loaded for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from popxl._analysis.functionalization import count_updates, functionalise
from popxl._analysis.memo import Deep
from popxl._ir.regions import regions
from popxl._schedule.buffer_donation import copy_borrowed_entries, donate
from popxl._schedule.control_flow import Nested
from popxl._schedule.index_arithmetic import host_rule, is_host_kind
from popxl._schedule.inlining import Flattener, is_outlined_call
from popxl._schedule.routine_builder import Assembly, labelled
from popxl._schedule.schedule import Compute, Load, Routine, Run, Schedule, Slot, Store
from popxl._schedule.schedule_walk import routines_by_part
from popxl.ops.remote import REMOTE_LOAD, REMOTE_STORE

if TYPE_CHECKING:
    from popxl._analysis.functionalization import Functional, Node, Value
    from popxl.ir import Ir
    from popxl.remote_buffer import RemoteBuffer

_BYTES = 32 * 2**20  # of entries loaded for one segment
_ENTRIES = 256  # that are loaded for one segment: XLA's time grows with the square of arguments


def build_schedule(ir: Ir) -> Schedule:
    """The schedule of the program of `ir`.

    Raises:
        ValueError: it reads an input of the main graph.
    """
    _check_inputs(ir)
    graph = functionalise(ir.main_graph)
    main = _Program().routine(graph, frozenset(), range(len(graph.outputs)))
    routines = list(dict.fromkeys(routine for routine, _ in routines_by_part(main)))
    copy_borrowed_entries(routines)
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


class _Program:
    """Routines made so far, and what is known of graphs."""

    def __init__(self) -> None:
        self.routines: dict[Any, Routine] = {}
        self.flattened = Flattener()
        self._deep = Deep()

    def routine(
        self,
        graph: Functional,
        known: frozenset[int],
        arrays: Iterable[int],
        zeros: Sequence[int] = (),
    ) -> Routine:
        """The routine of a graph.

        Args:
            known: inputs that are numbers which the host knows.
            arrays: outputs that have to be arrays.
            zeros: inputs that are zeros, and not passed.
        """
        key = graph, known, frozenset(arrays), tuple(zeros)
        return self._deep.once(self.routines, key, lambda: _Builder(self, *key).build())


class _Builder:
    """Makes the routine of one graph."""

    def __init__(
        self,
        program: _Program,
        graph: Functional,
        known: frozenset[int],
        arrays: frozenset[int],
        zeros: tuple[int, ...],
    ) -> None:
        self._has_steps = graph.has_host_nodes
        self._candidates = _candidates(graph)
        title = f"{graph.graph.id}.first" if zeros else graph.graph.id
        if self._has_steps:
            graph = program.flattened(graph)
        if zeros:
            passed = [i for i in range(len(graph.inputs)) if i not in zeros]
            known = frozenset(passed.index(i) for i in known)
            self._candidates = {k for k, i in enumerate(passed) if i in self._candidates}
            graph = graph.with_zeros(zeros)
        self._graph, self._arrays = graph, arrays
        self._assembly = Assembly(title, graph.inputs, known)
        self._inputs = tuple(range(len(graph.inputs)))  # the first slots
        self._nested = Nested(self._assembly, program.routine)

    # ---- whole ----------------------------------------------------------------------------------
    def build(self) -> Routine:
        assembly = self._assembly
        self._walk()
        outputs = [self._output(k, v) for k, v in enumerate(self._graph.outputs)]
        assembly.finish()
        slots = assembly.slots
        routine = Routine(
            assembly.title, self._inputs, tuple(outputs), assembly.steps, slots.start, slots.specs,
            slots.size,
        )  # fmt: skip
        donate(routine, self._candidates)
        return routine

    def _output(self, index: int, value: Value) -> Slot:
        number = None if index in self._arrays else self._assembly.number(value)
        return self._assembly.array(value) if number is None else number

    # ---- nodes ----------------------------------------------------------------------------------
    def _walk(self) -> None:
        for node in self._graph.nodes:
            if node.is_rematerialised or (self._has_steps and self._computed(node)):
                continue
            if node.is_on_host:
                self._on_the_host(node)
            else:
                self._assembly.run(node)
            self._assembly.updates += count_updates(node)

    def _on_the_host(self, node: Node) -> None:
        if node.op is not None and node.op.defn is REMOTE_LOAD:
            self._load(node)
        elif node.op is not None and node.op.defn is REMOTE_STORE:
            self._store(node)
        elif node.regions[0].kind == "branch":
            self._nested.branch(node)
        elif node.called is None or node.called.has_host_nodes:
            self._nested.loop(node)
        else:
            self._outlined(node)

    def _computed(self, node: Node) -> bool:
        """Compute a node on the host, if it knows all inputs."""
        if node.op is None or node.kind != "op" or not all(
            is_host_kind(v.spec) for v in node.outputs
        ):  # fmt: skip
            return False
        rule = host_rule(node.op)
        ins = [self._assembly.number(v) for v in node.inputs]
        if rule is None or None in ins:
            return False
        outs = [self._assembly.slots.number() for _ in node.outputs]
        step = Compute(
            name=node.op.defn.name, rule=rule, ins=tuple(ins), outs=tuple(outs)  # type: ignore[arg-type]
        )  # fmt: skip
        self._assembly.step(step, node)
        for v, slot in zip(node.outputs, outs, strict=True):
            self._assembly.place(v, slot)
        return True

    # ---- transfers ------------------------------------------------------------------------------
    def _index(self, node: Node, position: int) -> Slot:
        if node.attrs["offset"] is not None:
            return self._assembly.slots.constant(node.attrs["offset"])
        value = node.inputs[position]
        slot = self._assembly.number(value)
        return self._assembly.fetched(value, node) if slot is None else slot

    def _waits(self, buffer: RemoteBuffer) -> bool:
        return any(store.buffer is buffer for store in self._assembly.open.waiting)

    def _make_room(self, buffer: RemoteBuffer) -> None:
        """Close the open segment if it has enough entries already."""
        nbytes = math.prod(buffer.tensor_shape) * buffer.tensor_dtype.itemsize
        piece = self._assembly.open
        is_full = piece.nbytes + nbytes > _BYTES or piece.entries >= _ENTRIES
        if piece.segment.nodes and is_full:
            self._assembly.close()
        self._assembly.open.nbytes += nbytes
        self._assembly.open.entries += 1

    def _load(self, node: Node) -> None:
        buffer, (value,) = node.attrs["buffer"], node.outputs
        at = self._index(node, len(node.inputs) - 1)  # before it, what is overwritten
        if self._waits(buffer):
            self._assembly.close()
        self._make_room(buffer)
        out = self._assembly.slots.array(value.spec)
        self._assembly.step(Load(out=out, buffer=buffer, at=at), node)
        self._assembly.place(value, out)

    def _store(self, node: Node) -> None:
        buffer = node.attrs["buffer"]
        at = self._index(node, 1)
        slot = self._assembly.array(node.inputs[0])
        store = labelled(Store(value=slot, buffer=buffer, at=at), node)
        piece = self._assembly.open
        if slot in piece.results.values() or self._waits(buffer):
            piece.waiting.append(store)
        else:
            self._assembly.steps.append(store)

    # ---- outlined graphs ------------------------------------------------------------------------
    def _outlined(self, node: Node) -> None:
        """A call that shares its segment with no other such call."""
        if any(map(is_outlined_call, self._assembly.open.segment.nodes)):
            self._assembly.close()
        self._assembly.run(node)


def _candidates(graph: Functional) -> set[int]:
    """Inputs that callers donate: those that change, and those that are carried on."""
    if graph.is_branch:
        return set()
    candidates = set(graph.changed)
    for site in graph.graph._call_sites:
        for region in regions(site):
            if region.graph is graph.graph and region.kind == "always":
                candidates |= {i for _, i in region.carried}
                candidates |= {i for i, at in enumerate(region.inputs) if at in site.site_modified}
    return candidates
