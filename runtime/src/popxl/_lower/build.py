"""From graphs to schedules: which ops the host does, and how the rest is cut into segments.

Device ops between hosted ones are grouped: a load moves in front of the segment that is open, a
store waits until it is closed. So a segment is closed only where the host has to wait for it, where
a buffer is loaded from after it was stored to, or where more than `_BYTES` were loaded for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from popxl._core.aliases import modified_inputs, modified_owners, owners
from popxl._core.apart import Halves, halves_of
from popxl._core.regions import Region, regions
from popxl._lower.assembly import ZERO
from popxl._lower.hosted import Hosted, is_same
from popxl._lower.hostside import host_rule, is_host_kind
from popxl._lower.nested import Nested
from popxl._lower.ownership import keep_apart, own
from popxl._lower.rounding import count_updates_of
from popxl._lower.schedule import Compute, Load, Routine, Run, Schedule, Slot, Store, calls
from popxl._lower.segment import Name, RunOp, Scope
from popxl.ops.placement import INIT
from popxl.ops.remote import REMOTE_LOAD, REMOTE_STORE

if TYPE_CHECKING:
    from popxl._core.op import Op
    from popxl.graph import Graph
    from popxl.ir import Ir
    from popxl.remote_buffer import RemoteBuffer
    from popxl.tensor import Shard, Tensor, Variable

_BYTES = 32 * 2**20  # of entries loaded for one segment


def build_schedule(ir: Ir) -> Schedule:
    """The schedule of the program of `ir`."""
    main = _Program(ir).main()
    routines = list(dict.fromkeys(_reached(main)))
    keep_apart(routines)
    runs = [step for r in routines for step in r.steps if isinstance(step, Run)]
    return Schedule(main, routines, [run.segment for run in runs])


def _reached(routine: Routine) -> Iterator[Routine]:
    """`routine` and all that it calls, these first."""
    for step in routine.steps:
        for passed in calls(step):
            yield from _reached(passed.routine)
    yield routine


def main_variables(ir: Ir) -> list[Variable | Shard]:
    """The state that lives on the device: the inputs of the main routine, in order."""
    return list(ir.main_graph._resident)


class _Program:
    """Routines made so far, and what is known of graphs."""

    def __init__(self, ir: Ir) -> None:
        self.ir = ir
        self.routines: dict[Any, Routine] = {}
        self.hosted = Hosted()

    def main(self) -> Routine:
        graph = self.ir.main_graph
        return _Builder(self, graph, main_variables(self.ir), set(), range(0)).build()

    def routine(
        self,
        graph: Graph,
        known: frozenset[int],
        arrays: Iterable[int],
        zeros: Sequence[Tensor] = (),
    ) -> Routine:
        """The routine of a graph: see `RoutineOf`."""
        key = graph, known, frozenset(arrays), tuple(zeros)
        if key not in self.routines:
            passed = [t for t in graph._inputs if t not in zeros]
            made = _Builder(self, graph, passed, set(known), arrays, zeros).build()
            self.routines[key] = made
        return self.routines[key]


class _Builder(Nested):
    """Makes the routine of one graph."""

    def __init__(
        self,
        program: _Program,
        graph: Graph,
        inputs: Sequence[Tensor],
        known: set[int],
        arrays: Iterable[int],
        zeros: Sequence[Tensor] = (),
    ) -> None:
        super().__init__(program.routine, graph, inputs, known, zeros)
        self._inputs, self._zeros, self._arrays = list(inputs), list(zeros), list(arrays)
        self._unwritable: dict[Graph, set[Tensor]] = {}
        self._uses: dict[Graph, set[Tensor]] = {}
        self.hosted = program.hosted
        self._has_hosted = program.hosted.has_hosted(graph)

    # ---- whole ----------------------------------------------------------------------------------
    def build(self) -> Routine:
        self._walk(self.scope)
        results = [*self.graph._outputs, *self._zeros]
        outputs = [self._output(i, t) for i, t in enumerate(results)]
        changed = {}
        for i, t in enumerate(self._inputs):
            slot = self._slot(self.scope, t)
            if slot is None:  # the open segment changes it
                self.close()
                slot = self._slot(self.scope, t)
            assert slot is not None
            if slot != self._input_slots[i]:
                changed[i] = slot
        self.close()
        self._finish_segments()
        routine = Routine(
            self.graph, self._title, tuple(self._input_slots), tuple(outputs), changed, self.steps,
            self.start, self.specs, self._size,
        )  # fmt: skip
        own(routine, self._owned_inputs())
        return routine

    def _owned_inputs(self) -> set[int]:
        """Inputs whose memory may be given away: those that change, and those carried on."""
        if self.graph is self.graph.ir.main_graph:
            changed = modified_owners(self.graph)
            return {i for i, t in enumerate(self._inputs) if t in changed}
        found = modified_inputs(self.graph)
        for site in self.graph._call_sites:
            for region in regions(site):
                if region.graph is self.graph:
                    found |= set(range(region.carried))
                    found |= {i for i, at in enumerate(region.inputs) if at in site.site_modified}
                    if region.kind == "branch":
                        return set()
        tensors = {self.graph._inputs[i] for i in found}
        return {i for i, t in enumerate(self._inputs) if t in tensors}

    def _output(self, index: int, t: Tensor) -> Slot:
        slot = self._slot(self.scope, t)
        if slot is None or (slot in self.numbers and index in self._arrays):
            return self._captured(self.scope, t)
        return slot

    # ---- ops ------------------------------------------------------------------------------------
    def _walk(self, scope: Scope) -> None:
        for op in scope.graph._ops:
            if op.view:
                continue
            if self._has_hosted and self._on_host(scope, op):
                pass
            elif self.hosted.is_hosted(op) or (self._has_hosted and self.hosted.is_inlined(op)):
                self._hosted_op(scope, op)
            elif op.defn is INIT:
                self._where[scope, op.outputs[0]] = ZERO
            elif self._has_hosted and is_same(op):
                self._bind((scope, op.outputs[0]), (scope, op.inputs[0]))
            else:
                self._device_op(scope, op)
            self._updates += 0 if self._is_nested(op) else count_updates_of(op)

    def _is_nested(self, op: Op) -> bool:
        return self._has_hosted and self.hosted.is_inlined(op)

    def _hosted_op(self, scope: Scope, op: Op) -> None:
        if op.defn is REMOTE_LOAD:
            self._load(scope, op)
        elif op.defn is REMOTE_STORE:
            self._store(scope, op)
        elif self.hosted.is_inlined(op):
            self._inline(scope, op)
        elif any(r.kind == "branch" for r in regions(op)):
            self._branch(scope, op)
        elif not any(self.hosted.has_hosted(r.graph) for r in regions(op)) and _runs_once(op):
            self._apart(scope, op)
        else:
            self._loop(scope, op)

    def _device_op(self, scope: Scope, op: Op) -> None:
        if not self._open.segment.items:
            self._open.updates = self._updates
        for t in op.inputs:
            self._read(scope, t)
        for i in op.modified_inputs():
            self._defined(scope, owners(op.inputs[i]))
        self._defined(scope, op.outputs[1 if op.inplace is not None else 0 :])
        self._open.segment.items.append(RunOp(scope, op, op.part or self._part))

    def _on_host(self, scope: Scope, op: Op) -> bool:
        """Compute `op` on the host, if it knows all inputs and nothing writes to the tensors."""
        if not all(is_host_kind(t.spec) for t in op.outputs):
            return False
        rule = host_rule(op)
        if rule is None or not self._unwritten(scope.graph).isdisjoint((*op.inputs, *op.outputs)):
            return False
        ins = [slot for t in op.inputs if (slot := self._number(scope, t)) is not None]
        if len(ins) < len(op.inputs):
            return False
        outs = [self.new_number() for _ in op.outputs]
        self._step(Compute(name=op.defn.name, rule=rule, ins=tuple(ins), outs=tuple(outs)), op)
        self._where.update(((scope, t), s) for t, s in zip(op.outputs, outs, strict=True))
        return True

    def _unwritten(self, graph: Graph) -> set[Tensor]:
        """Tensors that ops of `graph` modify, with what is in the same memory."""
        if graph not in self._unwritable:
            changed = modified_owners(graph)
            self._unwritable[graph] = {
                t
                for op in graph._ops
                for t in (*op.inputs, *op.outputs)
                if any(o in changed for o in owners(t))
            }
        return self._unwritable[graph]

    # ---- transfers ------------------------------------------------------------------------------
    def _index(self, scope: Scope, op: Op, position: int) -> Slot:
        if op.attrs["offset"] is not None:
            return self.constant(op.attrs["offset"])
        t = op.inputs[position]
        slot = self._slot(scope, t)
        if slot is not None and slot in self.numbers:
            return slot
        return self._fetched(scope, t, op)

    def _waits(self, buffer: RemoteBuffer) -> bool:
        return any(store.buffer is buffer for store in self._open.waiting)

    def _make_room(self, buffer: RemoteBuffer) -> None:
        """Close the open segment if it has enough entries already."""
        nbytes = math.prod(buffer.tensor_shape) * buffer.tensor_dtype.itemsize
        if self._open.segment.items and self._open.nbytes + nbytes > _BYTES:
            self.close()
        self._open.nbytes += nbytes

    def _load(self, scope: Scope, op: Op) -> None:
        buffer = op.attrs["buffer"]
        at = self._index(scope, op, 0 if op.inplace is None else 1)
        if self._waits(buffer):
            self.close()
        self._make_room(buffer)
        out = self.new_array(op.outputs[0].spec)
        self._step(Load(out=out, buffer=buffer, at=at), op)
        if op.inplace is None:
            self._where[scope, op.outputs[0]] = out
        else:
            self._assign(scope, op.inputs[op.inplace], out)

    def _store(self, scope: Scope, op: Op) -> None:
        buffer = op.attrs["buffer"]
        at = self._index(scope, op, 1)
        slot = self._array(scope, op.inputs[0])
        store = Store(value=slot, buffer=buffer, at=at)
        store.part = op.part or self._part
        if slot in self._open.captured or self._waits(buffer):
            self._open.waiting.append(store)
        else:
            self.steps.append(store)

    # ---- calls taken apart -----------------------------------------------------------------------
    def _inline(self, scope: Scope, op: Op) -> None:
        (region,) = regions(op)
        with self._inside(scope, op, region) as inner:
            self._walk(inner)
        for t, at in zip(region.graph._outputs, region.outputs, strict=True):
            assert at is not None
            self._bind((scope, op.outputs[at]), (inner, t))

    @contextmanager
    def _inside(self, scope: Scope, op: Op, region: Region) -> Iterator[Scope]:
        """The graph that `op` calls, with its inputs bound."""
        inner = Scope(region.graph)
        for t, at in zip(region.graph._inputs, region.inputs, strict=True):
            assert at is not None
            self._bind((inner, t), (scope, op.inputs[at]))
        outer, self._part = self._part, op.part or self._part
        yield inner
        self._part = outer

    def _apart(self, scope: Scope, op: Op) -> None:
        """An op that is executables of its own, the same ones at all its calls."""
        self.close()
        found = regions(op)
        halves = halves_of(found[0].graph) if len(found) == 1 else None
        if halves is None:
            self._device_op(scope, op)
            self._close_with(list(self._open.defines))
        else:
            self._in_halves(scope, op, found[0], halves)

    def _in_halves(self, scope: Scope, op: Op, region: Region, halves: Halves) -> None:
        outputs = zip(region.graph._outputs, region.outputs, strict=True)
        used = self._used(scope.graph)
        wanted = [(t, op.outputs[at]) for t, at in outputs if at is not None]
        wanted = [(t, mine) for t, mine in wanted if mine in used]
        rest = {t for o in halves.rest for t in o.outputs}
        with self._inside(scope, op, region) as inner:
            for o in halves.first:
                self._device_op(inner, o)
            self._close_with([(inner, t) for t in halves.crossing])
            if not rest.isdisjoint(o for t, _ in wanted for o in owners(t)):
                for o in halves.rest:
                    self._device_op(inner, o)
                self.close()
        for t, mine in wanted:
            self._bind((scope, mine), (inner, t))

    def _close_with(self, results: Sequence[Name]) -> None:
        """Complete the open segment with these results, whoever asks for them."""
        self.close()
        for name in results:
            self._result(self._closed[-1], name)

    def _used(self, graph: Graph) -> set[Tensor]:
        """Tensors that ops of `graph` read, or that it returns."""
        if graph not in self._uses:
            self._uses[graph] = {*graph._outputs, *(t for op in graph._ops for t in op.inputs)}
        return self._uses[graph]


def _runs_once(op: Op) -> bool:
    return all(r.count == 1 and not r.carried and r.kind == "always" for r in regions(op))
