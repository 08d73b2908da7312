"""Look-ahead: the loads, stores and segment runs that a schedule will execute next.

Indices of entries follow from constants, counters and fetched scalars, so a walk over the schedule
with scalars alone, without arrays, can run ahead of the executor. It stops where it needs a scalar
that only the devices know, and continues once the executor has fetched it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from popxl._schedule.schedule import (
    Branch,
    Compute,
    Fetch,
    Load,
    Loop,
    Routine,
    Run,
    Schedule,
    Step,
    Store,
    routine_calls,
)
from popxl._schedule.schedule_walk import Frame, compute_scalars, routines_by_part, walk_steps

if TYPE_CHECKING:
    from popxl._schedule.schedule import Index


class LookaheadEvent(NamedTuple):
    """A load, a store or a segment run that the schedule will execute.

    Attributes:
        entry_index: index of the entry; of a run 0.
    """

    step: Load | Store | Run
    entry_index: Index = 0


def lookahead_events(main: Routine, fetched: deque[Any]) -> Iterator[LookaheadEvent | None]:
    """Yields a run's loads, stores and segment runs; None until a needed scalar is fetched.

    Args:
        fetched: numbers that the executor has fetched from the devices, in order; they are taken.

    Yields:
        Events; None as long as a number is missing.
    """
    arrays = [None] * len(main.inputs)
    for step, frame in walk_steps(Frame(main, arrays)):
        match step:
            case Load() | Store():
                yield LookaheadEvent(step, frame.registers[step.entry_index])
            case Run():
                yield LookaheadEvent(step)
            case Compute():
                compute_scalars(step, frame)
            case Fetch():
                while not fetched:
                    yield None
                frame.registers[step.out] = fetched.popleft()
            case Branch():
                while isinstance(frame.registers[step.condition], tuple):  # the executor will raise
                    yield None


def static_events(schedule: Schedule) -> Iterator[LookaheadEvent | None]:
    """Yields a run's loads, stores and segment runs without a run: fetched scalars count as 0."""
    fetched = deque[Any]()
    for event in lookahead_events(schedule.main, fetched):
        if event is None:
            fetched.append(0)
        yield event


# ---- the window ---------------------------------------------------------------------------------
def default_prefetch_window(schedule: Schedule) -> int:
    """Returns the default prefetch window: bytes of two layers' remote-buffer entries per replica.

    A layer is an iteration of a loop that loads entries, with one iteration of each loop inside it
    (a micro-batch); a loop around such loops is an optimizer step. What is loaded outside of loops
    counts by parts of the program. The largest counts.
    """
    loaded: dict[Routine, int] = {}  # bytes that a frame loads, each loop inside it run once
    depth: dict[Routine, int] = {}  # how deep loops that load are nested
    for routine in schedule.routines:
        inner = [
            (step, call_args.routine) for step in routine.steps for call_args in routine_calls(step)
        ]
        depth[routine] = max(
            (depth[r] + _is_repeated_loop(s) for s, r in inner if loaded[r]), default=0
        )
        loaded[routine] = sum(_loaded_bytes(step, loaded) for step in routine.steps)

    def is_layer(step: Step) -> bool:
        return _is_repeated_loop(step) and depth[routine_calls(step)[0].routine] < 2

    largest = 0
    for routine, part in routines_by_part(schedule.main, is_layer):
        outside_loops: Counter[str] = Counter()
        for step in routine.steps:
            if isinstance(step, Load):
                outside_loops[step.part or part] += step.nbytes
            elif is_layer(step):
                largest = max(largest, _loaded_bytes(step, loaded))
        largest = max(largest, *outside_loops.values(), 0)
    return 2 * largest


def _loaded_bytes(step: Step, routine_bytes: Mapping[Routine, int]) -> int:
    """Returns the bytes of remote-buffer entries that a step loads on one replica."""
    if isinstance(step, Load):
        return step.nbytes
    return max((routine_bytes[call_args.routine] for call_args in routine_calls(step)), default=0)


def _is_repeated_loop(step: Step) -> bool:
    return isinstance(step, Loop) and step.count > 1
