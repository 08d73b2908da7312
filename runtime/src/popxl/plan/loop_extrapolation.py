"""Extrapolation of long loops with equal iterations from a few simulated iterations.

A run that streams the weights for each generated token consists of hundreds of equal passes.
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

_LONG = 12  # iterations from which extrapolation pays

T = TypeVar("T")


def measure_extrapolated(
    schedule: Schedule, measure: Callable[[Schedule], T], first_count: int, period: int
) -> tuple[T, T, float]:
    """Measures a schedule at two small iteration counts of its longest steady-state loop.

    Steady state: equal iterations. Without such a loop, the full schedule is measured.

    Args:
        first_count: iterations until the loop is in a steady state.
        period: iterations after which its state repeats.

    Returns:
        The measurements with `first_count` and with `first_count + period` iterations, and the
        number of times that their difference has to be added.
    """
    loops = [step for step in schedule.main.steps if isinstance(step, Loop) and step.count > _LONG]
    loop = max(filter(_is_steady, loops), key=lambda loop: loop.count, default=None)
    if loop is None:
        full = measure(schedule)
        return full, full, 0.0
    truncate_call, long = (
        measure(_with_loop_count(schedule, loop, n)) for n in (first_count, first_count + period)
    )
    return truncate_call, long, (loop.count - first_count - period) / period


def truncate_loops(schedule: Schedule, max_iterations: int) -> Schedule:
    """Returns the schedule with at most `max_iterations` iterations of each loop."""
    truncated: dict[Routine, Routine] = {}

    def truncate_call(call_args: CallArgs) -> CallArgs:
        return replace(call_args, routine=truncated[call_args.routine])

    def truncate_step(step: Step) -> Step:
        match step:
            case Loop():
                return replace(
                    step, body=truncate_call(step.body), count=min(step.count, max_iterations)
                )
            case Branch():
                return replace(step, branches=tuple(map(truncate_call, step.branches)))
        return step

    for routine in schedule.routines:  # those first that others call
        truncated[routine] = replace(routine, steps=[truncate_step(step) for step in routine.steps])
    return replace(schedule, main=truncated[schedule.main], routines=list(truncated.values()))


def _with_loop_count(schedule: Schedule, loop: Loop, count: int) -> Schedule:
    """Returns the schedule with `count` iterations of one loop of its main routine."""
    main = schedule.main
    steps = [replace(step, count=count) if step is loop else step for step in main.steps]
    new = replace(main, steps=steps)
    routines = [new if routine is main else routine for routine in schedule.routines]
    return replace(schedule, main=new, routines=routines)


def _is_steady(loop: Loop) -> bool:
    """True if no buffer index and no branch condition in a loop depends on loop-carried values."""
    return _varying_outputs(loop.body.routine, frozenset(i for _, i in loop.carried)) is not None


def _varying_outputs(routine: Routine, inputs: frozenset[int]) -> frozenset[int] | None:
    """Returns the routine outputs that depend on given inputs; None if an index or condition does.

    Fetched numbers are taken to be 0.
    """
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
                    varying = _varying_call_outputs(call_args, carried, registers)
                    if varying is None:
                        return None
                    registers.update(register for k in varying if (register := outs[k]) is not None)
    return frozenset(k for k, register in enumerate(routine.outputs) if register in registers)


def _varying_call_outputs(
    call_args: CallArgs, carried: Sequence[tuple[int, int]], registers: Set[int]
) -> frozenset[int] | None:
    """Returns the call outputs that depend on `registers`; None if an index or condition does."""
    inputs = {i for i, register in enumerate(call_args.args) if register in registers}
    while True:
        varying = _varying_outputs(call_args.routine, frozenset(inputs))
        added = {i for k, i in carried if varying and k in varying} - inputs
        if not added:
            return varying
        inputs |= added
