"""From graphs to schedules: which ops the host does, and how the rest is cut into segments.

An op is *hosted* if it moves an entry of a remote buffer, if a graph that it runs holds a hosted
op, or if it calls a graph that is compiled apart. Device ops between hosted ones are grouped: a
load moves in front of the segment that is open, a store waits until it is closed. So a segment is
closed only where the host has to wait for it, where a buffer is loaded from after it was stored to,
or where more than `_BYTES` were loaded for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from popxl._core.aliases import modified_inputs, modified_owners, owners
from popxl._core.apart import Halves, halves_of
from popxl._core.regions import Region, regions
from popxl._lower.hostside import host_constant, host_rule, is_host_kind
from popxl._lower.ownership import keep_apart, own
from popxl._lower.rounding import count_updates, count_updates_of
from popxl._lower.schedule import (
    Branch,
    Compute,
    Fetch,
    Load,
    Loop,
    Passed,
    Routine,
    Run,
    Schedule,
    Slot,
    Step,
    Store,
    calls,
)
from popxl._lower.segment import Bind, Capture, Name, RunOp, Scope, Segment, Write
from popxl.ops.remote import REMOTE_LOAD, REMOTE_STORE
from popxl.tensor import Constant, TensorSpec

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


# ---- what is hosted -----------------------------------------------------------------------------
class _Program:
    """Routines made so far, and what is known of graphs."""

    def __init__(self, ir: Ir) -> None:
        self.ir = ir
        self.routines: dict[Any, Routine] = {}
        self._hosted: dict[Graph, bool] = {}
        self._inlined: dict[Graph, bool] = {}

    def main(self) -> Routine:
        graph = self.ir.main_graph
        return _Builder(self, graph, main_variables(self.ir), set(), range(0)).build()

    def routine(self, graph: Graph, known: frozenset[int], arrays: Iterable[int]) -> Routine:
        """The routine of a graph.

        Args:
            known: inputs that are numbers which the host knows.
            arrays: outputs that have to be arrays.
        """
        key = graph, known, frozenset(arrays)
        if key not in self.routines:
            made = _Builder(self, graph, graph._inputs, set(known), arrays).build()
            self.routines[key] = made
        return self.routines[key]

    def is_hosted(self, op: Op) -> bool:
        if op.defn in (REMOTE_LOAD, REMOTE_STORE):
            return True
        found = [r.graph for r in regions(op) if r.kind != "derivative"]
        return any(graph._apart is not None or self.has_hosted(graph) for graph in found)

    def has_hosted(self, graph: Graph) -> bool:
        """Whether `graph` holds a hosted op."""
        if graph not in self._hosted:
            self._hosted[graph] = any(map(self.is_hosted, graph._ops))
        return self._hosted[graph]

    def is_inlined(self, op: Op) -> bool:
        """Whether a call is taken apart where it stands, because its graph does little but move
        entries, or passes its inputs on."""
        found = regions(op)
        if len(found) != 1 or found[0].count != 1 or found[0].kind != "always":
            return False
        graph = found[0].graph
        if graph not in self._inlined:
            self._inlined[graph] = self._can_be_inlined(graph)
        return self._inlined[graph] and not op.modified_inputs()

    def _can_be_inlined(self, graph: Graph) -> bool:
        if graph._apart is not None or modified_inputs(graph):
            return False
        if not self.has_hosted(graph):
            return any(_passed_on(t) for t in graph._outputs)
        return all(
            op.defn in (REMOTE_LOAD, REMOTE_STORE)
            or host_rule(op) is not None
            or _is_same(op)
            or self.is_inlined(op)
            for op in graph._ops
        )


def _passed_on(t: Tensor) -> bool:
    """Whether an output of a graph is one of its inputs, unchanged."""
    while t._producer is not None and _is_same(t._producer):
        t = t._producer.inputs[0]
    return t._producer is None


def _is_same(op: Op) -> bool:
    return op.defn.same is not None and op.inplace is None and op.defn.same(op)


# ---- building a routine -------------------------------------------------------------------------
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


class _Builder:
    """Makes the routine of one graph."""

    def __init__(
        self,
        program: _Program,
        graph: Graph,
        inputs: Sequence[Tensor],
        known: set[int],
        arrays: Iterable[int],
    ) -> None:
        self.program, self.graph = program, graph
        self.scope = Scope(graph)
        self.steps: list[Step] = []
        self.specs: dict[Slot, TensorSpec] = {}
        self.start: dict[Slot, int] = {}
        self.numbers: set[Slot] = set()  # slots of numbers that the host knows
        self._size = 0
        self._inputs, self._arrays = list(inputs), list(arrays)
        self._closed: list[_Closed] = []
        self._where: dict[Name, Slot | _Closed | _Open] = {}
        self._constants: dict[int, Slot] = {}
        self._unwritable: dict[Graph, set[Tensor]] = {}
        self._uses: dict[Graph, set[Tensor]] = {}
        self._updates = 0
        self._part = ""  # of the call that is inlined
        self._hosted = program.has_hosted(graph)
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

    # ---- whole ----------------------------------------------------------------------------------
    def build(self) -> Routine:
        self._walk(self.scope)
        outputs = [self._output(i, t) for i, t in enumerate(self.graph._outputs)]
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
            self.graph, tuple(self._input_slots), tuple(outputs), changed, self.steps, self.start,
            self.specs, self._size,
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
        return found

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
            if self._hosted and self._on_host(scope, op):
                pass
            elif self.program.is_hosted(op) or (self._hosted and self.program.is_inlined(op)):
                self._hosted_op(scope, op)
            elif self._hosted and _is_same(op):
                self._bind((scope, op.outputs[0]), (scope, op.inputs[0]))
            else:
                self._device_op(scope, op)
            self._updates += 0 if self._is_nested(op) else count_updates_of(op)

    def _is_nested(self, op: Op) -> bool:
        return self._hosted and self.program.is_inlined(op)

    def _hosted_op(self, scope: Scope, op: Op) -> None:
        if op.defn is REMOTE_LOAD:
            self._load(scope, op)
        elif op.defn is REMOTE_STORE:
            self._store(scope, op)
        elif self.program.is_inlined(op):
            self._inline(scope, op)
        elif any(r.kind == "branch" for r in regions(op)):
            self._branch(scope, op)
        elif not any(self.program.has_hosted(r.graph) for r in regions(op)) and _runs_once(op):
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
        ins = [self._number(scope, t) for t in op.inputs]
        if None in ins:
            return False
        outs = [self.new_number() for _ in op.outputs]
        self._step(Compute(name=op.defn.name, rule=rule, ins=tuple(ins), outs=tuple(outs)), op)  # type: ignore[arg-type]
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
        while t._producer is not None and t._producer.outputs[0] is t:
            if t._producer.inplace is None:
                if t._producer.view:
                    return None
                break
            t = t._producer.inputs[t._producer.inplace]
        found = self._where.get((scope, t))
        if isinstance(found, _Closed):
            return self._result(found, (scope, t))
        if isinstance(found, _Open):
            return None
        return self._number(scope, t) if found is None else found

    def _result(self, closed: _Closed, name: Name) -> Slot:
        if name not in closed.results:
            closed.results[name] = self.new_array(name[1].spec)
        return closed.results[name]

    def _array(self, scope: Scope, t: Tensor) -> Slot:
        """A slot with the array of `t`; it may be given its value when the open segment has run."""
        slot = self._slot(scope, t)
        return self._captured(scope, t) if slot is None or slot in self.numbers else slot

    def _captured(self, scope: Scope, t: Tensor) -> Slot:
        self._read(scope, t)
        segment = self._open.segment
        if not segment.items:
            self._open.updates = self._updates
        segment.items.append(Capture(scope, t, len(segment.captures)))
        segment.captures.append(TensorSpec(t.shape, t.dtype))
        slot = self.new_array(t.spec)
        self._open.captured.append(slot)
        return slot

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
        if not self._open.segment.items:
            self._open.updates = self._updates
        self._open.segment.items.append(Bind(to, source))
        self._defined(to[0], [to[1]])

    def _assign(self, scope: Scope, t: Tensor, slot: Slot) -> None:
        """Let `t`, and all that it is a view of, have the array in `slot`."""
        touched = [(scope, o) for o in owners(t)]
        if any(n in self._open.args or n in self._open.defines for n in touched):
            self.close()
        if len(touched) == 1 and self._is_whole(t):
            self._where[touched[0]] = slot
            return
        self._read(scope, t)
        self._open.args[slot] = slot
        self._open.segment.items.append(Write(scope, t, slot))
        self._defined(scope, owners(t))

    @staticmethod
    def _is_whole(t: Tensor) -> bool:
        """Whether `t` is all of its owner, under the same shape."""
        while (op := t._producer) is not None and op.outputs[0] is t:
            if op.inplace is None:
                return not op.view
            t = op.inputs[op.inplace]
        return True

    # ---- segments -------------------------------------------------------------------------------
    def _new_segment(self) -> _Open:
        return _Open(Segment(f"{self.graph.id}.{len(self._closed)}"))

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
            self._open.segment.name = f"{self.graph.id}.{len(self._closed)}"
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

    # ---- transfers ------------------------------------------------------------------------------
    def _index(self, scope: Scope, op: Op, position: int) -> Slot:
        if op.attrs["offset"] is not None:
            return self.constant(op.attrs["offset"])
        t = op.inputs[position]
        slot = self._slot(scope, t)
        if slot is not None and slot in self.numbers:
            return slot
        return self._fetched(scope, t, op)

    def _fetched(self, scope: Scope, t: Tensor, op: Op) -> Slot:
        """A number that only the devices know, fetched."""
        array = self._array(scope, t)
        self.close()
        number = self.new_number()
        self._step(Fetch(value=array, out=number), op)
        return number

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

    # ---- calls, loops, branches -----------------------------------------------------------------
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

    def _loop(self, scope: Scope, op: Op) -> None:
        (region,) = regions(op)
        if region.count == 0:
            for i in range(region.carried):
                self._bind((scope, op.outputs[i]), (scope, op.inputs[i]))
            return
        known = self._known_in_loop(scope, op, region)
        carried_arrays = [i for i in range(region.carried) if i not in known]
        routine = self.program.routine(region.graph, known, carried_arrays)
        args = [self._argument(scope, op, at, i in known) for i, at in enumerate(region.inputs)]
        self.close()
        outs: list[Slot | None] = []
        for i, at in enumerate(region.outputs):
            assert at is not None
            number = routine.outputs[i] not in routine.specs
            out = self.new_number() if number else self.new_array(op.outputs[at].spec)
            self._where[scope, op.outputs[at]] = out
            outs.append(out)
        modified = op.modified_inputs()
        moving = [i for i, at in enumerate(region.inputs)
                  if at in modified and i >= region.carried and i in routine.changed]  # fmt: skip
        changed = {i: self.new_array(region.graph._inputs[i].spec) for i in moving}
        body = Passed(routine=routine, args=tuple(args), outs=tuple(outs), changed=changed)
        step = Loop(
            body=body,
            count=region.count,
            carried=region.carried,
            updates=(self._updates, count_updates(region.graph)),
        )
        self._step(step, op)
        for i, slot in changed.items():
            self._assign(scope, op.inputs[_at(region, i)], slot)
        for i in range(region.carried):  # ends with the last iteration's value
            if region.inputs[i] in modified:
                last = outs[i]
                assert last is not None
                self._assign(scope, op.inputs[_at(region, i)], last)

    def _known_in_loop(self, scope: Scope, op: Op, region: Region) -> frozenset[int]:
        """Inputs of the graph that are numbers in all iterations."""
        modified = op.modified_inputs()
        known = {
            i
            for i, at in enumerate(region.inputs)
            if at is not None
            and at not in modified
            and self._number(scope, op.inputs[at]) is not None
        }
        while region.count != 1 or region.carried:
            routine = self.program.routine(
                region.graph, frozenset(known), [i for i in range(region.carried) if i not in known]
            )
            lost = {i for i in range(region.carried)
                    if i in known and routine.outputs[i] in routine.specs}  # fmt: skip
            if not lost:
                break
            known -= lost
        return frozenset(known)

    def _argument(self, scope: Scope, op: Op, at: int | None, known: bool) -> Slot:
        assert at is not None
        t = op.inputs[at]
        slot = self._number(scope, t) if known else self._array(scope, t)
        assert slot is not None
        return slot

    def _branch(self, scope: Scope, op: Op) -> None:
        condition = self._number(scope, op.inputs[0])
        if condition is None:
            condition = self._fetched(scope, op.inputs[0], op)
        modified = sorted(op.modified_inputs())
        targets = list(dict.fromkeys(op.inputs[i] for i in modified))
        before = [self._array(scope, t) for t in targets]
        branches, sources = [], []
        for region in regions(op):
            routine = self.program.routine(
                region.graph, frozenset(), range(len(region.graph._outputs))
            )
            args = [self._argument(scope, op, at, False) for at in region.inputs]
            branches.append(Passed(routine=routine, args=tuple(args), outs=()))
            sources.append({
                targets.index(op.inputs[_at(region, i)]): i
                for i in range(len(region.inputs))
                if region.inputs[i] in modified and i in routine.changed
            })  # fmt: skip
        self.close()
        outs = [self.new_array(t.spec) for t in op.outputs]
        after = [self.new_array(t.spec) for t in targets]
        self._step(
            Branch(
                condition=condition,
                branches=(branches[0], branches[1]),
                outs=tuple(outs),
                changed=tuple(zip(before, after, strict=True)),
                sources=(sources[0], sources[1]),
                updates=self._updates,
            ),
            op,
        )
        self._where.update(((scope, t), s) for t, s in zip(op.outputs, outs, strict=True))
        for t, slot in zip(targets, after, strict=True):
            self._assign(scope, t, slot)


def _runs_once(op: Op) -> bool:
    return all(r.count == 1 and not r.carried and r.kind == "always" for r in regions(op))


def _at(region: Region, index: int) -> int:
    at = region.inputs[index]
    assert at is not None
    return at


def _plain(t: Tensor) -> TensorSpec:
    return TensorSpec(t.shape, t.dtype)
