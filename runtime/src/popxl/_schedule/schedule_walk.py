"""The one way to walk a schedule: its steps, in the order in which a run does them.

A walk keeps the slots and follows calls, loops and branches; who iterates over it does each step:
the walker with arrays, the look-ahead with numbers. An observer is a generator between the two: it
passes the steps on, and sees the slots before and after each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from popxl._schedule.schedule import (
    Branch,
    Compute,
    Loop,
    Routine,
    Run,
    Slot,
    Step,
    calls,
    step_text,
)


class Activation:
    """A routine that runs.

    Args:
        inputs: values of the routine's inputs; the list is emptied.
        updates: random roundings before it.
        part: label of the part of the program that its caller belongs to.

    Attributes:
        slots: the value in each slot; None: it has none now.
    """

    __slots__ = ("part", "routine", "slots", "updates")

    def __init__(
        self, routine: Routine, inputs: list[Any], updates: int = 0, part: str = ""
    ) -> None:
        self.routine, self.updates, self.part = routine, updates, part
        self.slots: list[Any] = [None] * routine.size
        for slot, number in routine.start.items():
            self.slots[slot] = number
        self.give(routine.inputs, inputs)
        inputs.clear()

    def give(self, slots: Sequence[Slot | None], values: Iterable[Any]) -> None:
        """Put values into slots; those for None are dropped."""
        held = self.slots
        for slot, value in zip(slots, values, strict=True):
            if slot is not None:
                held[slot] = value

    def ended(self) -> list[Any]:
        """The outputs; the activation lets go of all values."""
        outputs = [self.slots[slot] for slot in self.routine.outputs]
        self.slots.clear()
        return outputs

    def part_of(self, step: Step) -> str:
        """The part of the program that a step belongs to; a segment may hold ops of several."""
        if isinstance(step, Run) and not step.part:
            parts = [node.part for node in step.segment.nodes if node.part]
            return " + ".join(dict.fromkeys(parts)) or self.part
        return step.part or self.part

    def text_of(self, step: Step) -> str:
        """A step of the routine as text, with the numbers that the host knows."""
        return step_text(
            step, {i: x for i, x in enumerate(self.slots) if isinstance(x, int | tuple)}
        )


Steps = Iterator[tuple[Step, Activation]]
Observer = Callable[[Steps], Steps]


def compute(step: Compute, at: Activation) -> None:
    """Do a step that computes numbers."""
    slots = at.slots
    for slot, number in zip(step.outs, step.rule(*[slots[i] for i in step.ins]), strict=True):
        slots[slot] = number


def walk(at: Activation, copy: Callable[[Any], Any] = lambda value: value) -> Steps:
    """The steps of an activation and of those in it.

    A step is done by the time that the next is asked for: what it computes is in its slots. Loops
    and branches come before the steps inside them; by then a branch's condition is one number.

    Args:
        copy: makes a value of its own memory.
    """
    under_way = [_steps(at, copy)]
    while under_way:
        for found in under_way[-1]:
            if isinstance(found, Activation):
                under_way.append(_steps(found, copy))
                break
            yield found
        else:
            under_way.pop()


def _steps(
    at: Activation, copy: Callable[[Any], Any]
) -> Iterator[tuple[Step, Activation] | Activation]:
    """The steps of an activation, and those in it, each walked through before the next item."""
    slots = at.slots
    for step in at.routine.steps:
        yield step, at
        if isinstance(step, Loop):
            yield from _iterations(step, at, copy)
        elif isinstance(step, Branch):
            passed = step.branches[0 if slots[step.condition] else 1]
            given = [slots[slot] for slot in passed.args]
            updates, part = at.updates + step.updates, step.part or at.part
            inner = Activation(passed.routine, given, updates, part)
            yield inner
            at.give(step.outs, inner.ended())
        for slot in step.last:
            slots[slot] = None


def _iterations(step: Loop, at: Activation, copy: Callable[[Any], Any]) -> Iterator[Activation]:
    """The activations of a loop's body, each walked through before the next is asked for."""
    body, routine = step.body, step.body.routine
    current = [at.slots[slot] for slot in body.args]
    for i in body.copies:
        current[i] = copy(current[i])
    for slot in body.donated:
        at.slots[slot] = None
    (base, each), part = step.updates, step.part or at.part
    outs: list[Any] = []
    into = {i for _, i in step.carried}
    for iteration in range(step.count):
        given = list(current)
        if iteration == step.count - 1:
            current.clear()
        else:
            for i in routine.consumed:
                if i in into:
                    current[i] = None
                else:  # the next iteration is given the same
                    given[i] = copy(given[i])
        updates = at.updates + base + iteration * each
        inner = Activation(routine, given, updates, part)
        yield inner
        outs = inner.ended()
        if iteration < step.count - 1:
            for k, i in step.carried:
                current[i] = outs[k]
            for i in step.copies:
                current[i] = copy(current[i])
            outs.clear()
    at.give(body.outs, outs)


def routines_by_part(
    main: Routine, skipped: Callable[[Step], bool] = lambda step: False
) -> Iterator[tuple[Routine, str]]:
    """All routines, those first that others call, however often they run: each once for each part
    of the program that calls it, unless the steps that call it are skipped."""

    def called(routine: Routine, part: str) -> Iterator[tuple[Routine, str]]:
        for step in routine.steps:
            for passed in () if skipped(step) else calls(step):
                yield passed.routine, step.part or part

    seen = {(main, "")}
    under_way = [((main, ""), called(main, ""))]
    while under_way:
        at, inner = under_way[-1]
        for found in inner:
            if found not in seen:
                seen.add(found)
                under_way.append((found, called(*found)))
                break
        else:
            under_way.pop()
            yield at
