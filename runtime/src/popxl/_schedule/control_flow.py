"""Nodes that run routines of their own: calls, loops and branches of the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from popxl._schedule.routine_builder import Assembly
from popxl._schedule.schedule import Branch, Loop, Passed, Routine, Slot

if TYPE_CHECKING:
    from popxl._analysis.functionalization import Functional, Node
    from popxl._ir.regions import Region


class Nested:
    """Adds such nodes to the steps of a routine."""

    def __init__(self, assembly: Assembly, routine_of: Callable[..., Routine]) -> None:
        """Args: `routine_of`: makes the routine of a graph, or finds it (`_Program.routine`)."""
        self._assembly, self._routine_of = assembly, routine_of

    # ---- calls and loops ------------------------------------------------------------------------
    def loop(self, node: Node) -> None:
        """A loop, or a call: a loop of one iteration."""
        (region,) = node.regions
        known = self._known(node, region)
        zeros = self._zeros(node, region)
        args = {i: self._argument(node, region, i, i in known)
                for i in range(len(region.inputs)) if i not in zeros}  # fmt: skip
        self._assembly.close()
        done = 0
        outs: Sequence[Slot | None] = ()
        if zeros:  # the first iteration is peeled: what is added to zeros need only be stored
            done, outs = 1, self._iterate(node, region, args, known, zeros, range(1))
        if region.count > done:
            outs = self._iterate(node, region, args, known, (), range(done, region.count))
        for at, out in zip(region.outputs, outs, strict=True):
            if at is not None and out is not None:
                self._assembly.place(node.outputs[at], out)

    def _iterate(
        self,
        node: Node,
        region: Region[Functional],
        args: dict[int, Slot],
        known: frozenset[int],
        zeros: Sequence[int],
        iterations: range,
    ) -> list[Slot | None]:
        """Run the graph of `region` for some of the iterations of `node`.

        Args:
            args: what the graph is given, by input; afterwards, what a further iteration is given.
            zeros: inputs that are zeros.

        Returns:
            Where the outputs are that somebody wants: those that the graph passes on, where the
            caller has them.
        """
        graph, slots = region.graph, self._assembly.slots
        inputs = [i for i in range(len(graph.inputs)) if i not in zeros]
        arrays = [k for k, i in region.carried if i not in known]
        routine = self._routine_of(graph, known, arrays, zeros)
        carried = {i: k for k, i in region.carried if i in args}

        def place(k: int) -> tuple[Slot | None, Slot | None]:
            """Where output `k` is, and the slot that the step gives it."""
            slot = routine.outputs[k]
            if region.outputs[k] is None:
                return None, None
            if slot in routine.inputs:
                i = inputs[routine.inputs.index(slot)]
                if len(iterations) == 1 or carried.get(i, k) == k:
                    return args[i], None
            new = slots.array(routine.specs[slot]) if slot in routine.specs else slots.number()
            return new, new

        places = [place(k) for k in range(len(routine.outputs))]
        each = graph.updates
        step = Loop(
            body=Passed(
                routine=routine,
                args=tuple(args[i] for i in inputs),
                outs=tuple(own for _, own in places),
            ),
            count=len(iterations),
            carried=tuple((k, inputs.index(i)) for k, i in region.carried if i in inputs),
            updates=(self._assembly.updates + iterations.start * each, each),
        )
        self._assembly.step(step, node)
        outputs = [slot for slot, _ in places]
        for k, i in region.carried:
            slot = outputs[k]
            assert slot is not None
            args[i] = slot
        return outputs

    def _zeros(self, node: Node, region: Region[Functional]) -> tuple[int, ...]:
        """Inputs of the graph that are zeros at first, and that it changes."""
        changed = {i for k, i in region.carried if k >= len(region.graph.graph._outputs)}
        return tuple(
            i for i in sorted(changed) if self._assembly.is_zeros(node.inputs[_at(region, i)])
        )

    def _known(self, node: Node, region: Region[Functional]) -> frozenset[int]:
        """Inputs of the graph that are numbers in all iterations."""
        own = len(region.graph.graph._outputs)
        changed = {i for k, i in region.carried if k >= own}
        known = {
            i
            for i, at in enumerate(region.inputs)
            if at is not None
            and i not in changed
            and self._assembly.number(node.inputs[at]) is not None
        }
        while region.carried:
            arrays = [k for k, i in region.carried if i not in known]
            routine = self._routine_of(region.graph, frozenset(known), arrays)
            lost = {i for k, i in region.carried
                    if i in known and routine.outputs[k] in routine.specs}  # fmt: skip
            if not lost:
                break
            known -= lost
        return frozenset(known)

    def _argument(self, node: Node, region: Region[Functional], index: int, known: bool) -> Slot:
        value = node.inputs[_at(region, index)]
        slot = self._assembly.number(value) if known else self._assembly.array(value)
        assert slot is not None
        return slot

    # ---- branches -------------------------------------------------------------------------------
    def branch(self, node: Node) -> None:
        """A conditional."""
        assembly = self._assembly
        condition = assembly.number(node.inputs[0])
        if condition is None:
            condition = assembly.fetched(node.inputs[0], node)
        branches = []
        for region in node.regions:
            every = range(len(region.graph.outputs))
            routine = self._routine_of(region.graph, frozenset(), every)
            args = [self._argument(node, region, i, False) for i in range(len(region.inputs))]
            branches.append(Passed(routine=routine, args=tuple(args)))
        assembly.close()
        outs: list[Slot | None] = []
        for k, value in enumerate(node.outputs):
            passed = {_passed_on(branch, k) for branch in branches}
            (slot,) = passed if len(passed) == 1 else (None,)
            if slot is None:
                new = assembly.slots.array(value.spec)
            outs.append(new if slot is None else None)
            assembly.place(value, new if slot is None else slot)
        step = Branch(
            condition=condition, branches=tuple(branches), outs=tuple(outs),
            updates=assembly.updates,
        )  # fmt: skip
        assembly.step(step, node)


def _passed_on(passed: Passed, output: int) -> Slot | None:
    """The caller's slot that an output of a routine is; None: it is another."""
    routine = passed.routine
    slot = routine.outputs[output]
    return passed.args[routine.inputs.index(slot)] if slot in routine.inputs else None


def _at(region: Region[Functional], index: int) -> int:
    at = region.inputs[index]
    assert at is not None
    return at
