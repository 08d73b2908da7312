"""Loops whose iterations are alike: of a long one few are looked at, and the others follow.

Where weights pass layer by layer for each token that is written, a run is hundreds of equal passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from typing import TypeVar

from popxl._schedule.schedule import (
    Branch,
    CallArgs,
    Compute,
    Loop,
    Routine,
    Schedule,
    Step,
    Transfer,
)

_LONG = 12  # iterations of a loop that is worth it

T = TypeVar("T")


def measure_extrapolated(
    schedule: Schedule, measure: Callable[[Schedule], T], first: int, period: int
) -> tuple[T, T, float]:
    """Measure a schedule with few iterations of its longest loop whose iterations move the same
    entries; the whole one, if it has none.

    Args:
        first: iterations after which each takes as long as the next.
        period: iterations, or as many, if they take turns.

    Returns:
        What is measured with `first` iterations and with `first + period`, and how many times their
        difference is missing.
    """
    loops = [step for step in schedule.main.steps if isinstance(step, Loop) and step.count > _LONG]
    loop = max(filter(_is_steady, loops), key=lambda loop: loop.count, default=None)
    if loop is None:
        whole = measure(schedule)
        return whole, whole, 0.0
    few, more = (measure(_with_count(schedule, loop, n)) for n in (first, first + period))
    return few, more, (loop.count - first - period) / period


def truncate_loops(schedule: Schedule, most: int) -> Schedule:
    """The schedule with at most so many iterations of each loop, whatever they move."""
    made: dict[Routine, Routine] = {}

    def short(call_args: CallArgs) -> CallArgs:
        return replace(call_args, routine=made[call_args.routine])

    def step_of(step: Step) -> Step:
        match step:
            case Loop():
                return replace(step, body=short(step.body), count=min(step.count, most))
            case Branch():
                return replace(step, branches=tuple(map(short, step.branches)))
        return step

    for routine in schedule.routines:  # those first that others call
        made[routine] = replace(routine, steps=[step_of(step) for step in routine.steps])
    return replace(schedule, main=made[schedule.main], routines=list(made.values()))


def _with_count(schedule: Schedule, loop: Loop, count: int) -> Schedule:
    """The schedule with another number of iterations of a loop of its main routine."""
    main = schedule.main
    steps = [replace(step, count=count) if step is loop else step for step in main.steps]
    new = replace(main, steps=steps)
    routines = [new if routine is main else routine for routine in schedule.routines]
    return replace(schedule, main=new, routines=routines)


def _is_steady(loop: Loop) -> bool:
    """Whether no index and no condition follows from what one iteration passes to the next."""
    return _varying_outputs(loop.body.routine, frozenset(i for _, i in loop.carried)) is not None


def _varying_outputs(routine: Routine, inputs: frozenset[int]) -> frozenset[int] | None:
    """Outputs that vary where these inputs do; None: an index or a condition varies, too. What is
    fetched is taken to be 0."""
    registers = {routine.inputs[i] for i in inputs}
    for step in routine.steps:
        match step:
            case Transfer() if step.entry_index in registers:
                return None
            case Branch() if step.condition in registers:
                return None
            case Compute() if not registers.isdisjoint(step.ins):
                registers.update(step.outs)
            case Loop() | Branch():
                of = [step.body] if isinstance(step, Loop) else step.branches
                carried = step.carried if isinstance(step, Loop) else ()
                outs = step.body.outs if isinstance(step, Loop) else step.outs
                for call_args in of:
                    found = _varying_call_outputs(call_args, carried, registers)
                    if found is None:
                        return None
                    registers.update(register for k in found if (register := outs[k]) is not None)
    return frozenset(k for k, register in enumerate(routine.outputs) if register in registers)


def _varying_call_outputs(
    call_args: CallArgs, carried: Sequence[tuple[int, int]], registers: Set[int]
) -> frozenset[int] | None:
    """Outputs of a call or loop that vary with these registers of its caller; None as above."""
    inputs = {i for i, register in enumerate(call_args.args) if register in registers}
    while True:
        found = _varying_outputs(call_args.routine, frozenset(inputs))
        more = {i for k, i in carried if found and k in found} - inputs
        if not more:
            return found
        inputs |= more
