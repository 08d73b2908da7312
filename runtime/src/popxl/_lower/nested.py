"""Ops that run routines of their own: calls, loops and branches of the host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from popxl._core.regions import Region, regions
from popxl._lower.assembly import Assembly
from popxl._lower.rounding import count_updates
from popxl._lower.schedule import Branch, Loop, Passed, Routine, Slot
from popxl._lower.segment import Scope

if TYPE_CHECKING:
    from popxl._core.op import Op
    from popxl.graph import Graph
    from popxl.tensor import Tensor


class RoutineOf(Protocol):
    """Makes the routine of a graph, or finds it."""

    def __call__(
        self,
        graph: Graph,
        known: frozenset[int],
        arrays: Iterable[int],
        zeros: Sequence[Tensor] = (),
    ) -> Routine:
        """
        Args:
            known: inputs that are numbers which the host knows, by position among those passed.
            arrays: outputs that have to be arrays.
            zeros: inputs that are zeros at first. They are not passed, but returned: the values
                that they have at the end follow the graph's outputs.
        """
        ...


class Nested(Assembly):
    """The steps of one routine, while those are made that run other routines."""

    def __init__(
        self,
        routine_of: RoutineOf,
        graph: Graph,
        inputs: Sequence[Tensor],
        known: set[int],
        zeros: Sequence[Tensor],
    ) -> None:
        super().__init__(graph, inputs, known, zeros)
        self._routine_of = routine_of

    # ---- calls and loops ------------------------------------------------------------------------
    def _loop(self, scope: Scope, op: Op) -> None:
        (region,) = regions(op)
        if region.count == 0:
            for i in range(region.carried):
                self._bind((scope, op.outputs[i]), (scope, op.inputs[i]))
            return
        known = self._known_in_loop(scope, op, region)
        zeros = self._zeros_in_loop(scope, op, region)
        args = {
            i: self._argument(scope, op, at, i in known)
            for i, at in enumerate(region.inputs)
            if i not in zeros
        }
        self.close()
        done = 0
        outs: tuple[Slot, ...] = ()
        if zeros:  # an iteration of its own: what is added to zeros need only be stored
            done, outs = 1, self._iterate(op, region, args, known, zeros, range(1))
        if region.count > done:
            outs = self._iterate(op, region, args, known, (), range(done, region.count))
        for at, out in zip(region.outputs, outs, strict=True):
            assert at is not None
            self._where[scope, op.outputs[at]] = out
        for i, slot in args.items():
            if region.inputs[i] in op.modified_inputs():
                self._assign(scope, op.inputs[_at(region, i)], slot)

    def _iterate(
        self,
        op: Op,
        region: Region,
        args: dict[int, Slot],
        known: frozenset[int],
        zeros: Sequence[int],
        iterations: range,
    ) -> tuple[Slot, ...]:
        """Run the graph of `region` for some of the iterations of `op`.

        Args:
            args: what the graph is given, by input; afterwards, what a further iteration is given.
            zeros: inputs that are zeros.

        Returns:
            The graph's outputs.
        """
        graph = region.graph
        passed = [i for i in range(len(graph._inputs)) if i not in zeros]
        routine = self._routine_of(
            graph,
            frozenset(passed.index(i) for i in known),
            [i for i in range(region.carried) if i not in known],
            [graph._inputs[i] for i in zeros],
        )

        def new(index: int) -> Slot:
            slot = routine.outputs[index]
            if slot not in routine.specs:
                return self.new_number()
            return self.new_array(routine.specs[slot])

        outs = [new(i) for i in range(len(routine.outputs))]
        modified = op.modified_inputs()
        changed = {
            at: self.new_array(graph._inputs[i].spec)
            for at, i in enumerate(passed)
            if region.inputs[i] in modified and i >= region.carried and at in routine.changed
        }
        each = count_updates(graph)
        step = Loop(
            body=Passed(
                routine=routine,
                args=tuple(args[i] for i in passed),
                outs=tuple(outs),
                changed=changed,
            ),
            count=len(iterations),
            carried=region.carried,
            updates=(self._updates + iterations.start * each, each),
        )
        self._step(step, op)
        own = len(graph._outputs)
        args.update(enumerate(outs[: region.carried]))
        args.update((passed[at], slot) for at, slot in changed.items())
        args.update(zip(zeros, outs[own:], strict=True))
        return tuple(outs[:own])

    def _zeros_in_loop(self, scope: Scope, op: Op, region: Region) -> list[int]:
        """Inputs of the graph that are zeros at first, and that it changes."""
        modified = op.modified_inputs()
        return [
            i
            for i, at in enumerate(region.inputs)
            if i >= region.carried and at in modified and self._is_zero(scope, op.inputs[at])
        ]

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
            routine = self._routine_of(
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

    # ---- branches -------------------------------------------------------------------------------
    def _branch(self, scope: Scope, op: Op) -> None:
        condition = self._number(scope, op.inputs[0])
        if condition is None:
            condition = self._fetched(scope, op.inputs[0], op)
        modified = sorted(op.modified_inputs())
        targets = list(dict.fromkeys(op.inputs[i] for i in modified))
        before = [self._array(scope, t) for t in targets]
        branches, sources = [], []
        for region in regions(op):
            routine = self._routine_of(region.graph, frozenset(), range(len(region.graph._outputs)))
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


def _at(region: Region, index: int) -> int:
    at = region.inputs[index]
    assert at is not None
    return at
