"""What a schedule will do next, as far as the host knows it: its loads, stores and runs in order.

The indices of entries follow from constants, counters and numbers that were fetched, so a walk
with numbers alone, which runs nothing, is ahead of the walker by as much as one likes. It stops
where a number is needed that only the devices know, and goes on once it was fetched.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator
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
    calls,
)

if TYPE_CHECKING:
    from popxl._schedule.schedule import Index

Numbers = list[Any]  # by position; None: no number that the host knows


class Event(NamedTuple):
    """A load, store or run of a schedule.

    Attributes:
        entry: index of the entry; of a run 0.
    """

    step: Load | Store | Run
    entry: Index = 0


def upcoming(
    routine: Routine, fetched: deque[Any], given: Iterable[Any] = ()
) -> Generator[Event | None, None, Numbers]:
    """The events of an activation in the order in which the walker does them.

    Args:
        fetched: numbers that the walker has fetched from the devices, in order; they are taken.
        given: numbers among the routine's inputs.

    Yields:
        Events; None as long as a number is missing.

    Returns:
        Numbers among the routine's outputs.
    """
    numbers: dict[int, Any] = dict(routine.start)
    numbers.update(
        (slot, value)
        for slot, value in zip(routine.inputs, given, strict=False)
        if value is not None
    )
    for step in routine.steps:
        match step:
            case Load() | Store():
                yield Event(step, numbers[step.at])
            case Run():
                yield Event(step)
            case Compute():
                found = step.rule(*(numbers[s] for s in step.ins))
                numbers.update(zip(step.outs, found, strict=True))
            case Fetch():
                while not fetched:
                    yield None
                numbers[step.out] = fetched.popleft()
            case Loop():
                yield from _iterations(step, numbers, fetched)
            case Branch():
                condition = numbers[step.condition]
                while isinstance(condition, tuple):  # the walker will raise
                    yield None
                yield from upcoming(step.branches[0 if condition else 1].routine, fetched)
    return [numbers.get(slot) for slot in routine.outputs]


def _iterations(
    step: Loop, numbers: dict[int, Any], fetched: deque[Any]
) -> Generator[Event | None, None, None]:
    current = [numbers.get(slot) for slot in step.body.args]
    outs: Numbers = []
    for _ in range(step.count):
        outs = yield from upcoming(step.body.routine, fetched, current)
        for k, i in step.carried:
            current[i] = outs[k]
    numbers.update(
        (slot, value)
        for slot, value in zip(step.body.outs, outs, strict=False)
        if slot is not None and value is not None
    )


class Fetched:
    """Numbers that the walker has fetched from the devices, for the walks that are ahead of it."""

    def __init__(self) -> None:
        self._waiting: list[deque[Any]] = []

    def followed(self) -> deque[Any]:
        """Those that a walk has not taken yet, see `upcoming`."""
        self._waiting.append(deque())
        return self._waiting[-1]

    def append(self, number: Index) -> None:
        """The walker has fetched one more."""
        for waiting in self._waiting:
            waiting.append(number)


class _Zeros(deque[Any]):
    """Stands for numbers that nobody has fetched: zeros."""

    def __bool__(self) -> bool:
        return True

    def popleft(self) -> int:
        return 0


def expected(schedule: Schedule) -> Iterator[Event]:
    """The events of a run. Numbers that only devices know are taken to be 0."""
    return filter(None, upcoming(schedule.main, _Zeros()))


def accesses(schedule: Schedule) -> Counter[tuple[Load | Store, int]]:
    """How often each load and store of an `expected` run is of which entry; replicas are taken to
    be alike."""
    found: Counter[tuple[Load | Store, int]] = Counter()
    for step, entry in expected(schedule):
        if not isinstance(step, Run):
            found[step, entry[0] if isinstance(entry, tuple) else entry] += 1
    return found


# ---- the window ---------------------------------------------------------------------------------
def window_of(schedule: Schedule) -> int:
    """Bytes of two layers' entries on one replica: how much may be on its way ahead of its use.

    A layer is an iteration of a loop that loads entries, with one iteration of each loop inside it
    (a micro-batch); a loop around such loops is an optimizer step. What is loaded outside of loops
    counts by parts of the program. The largest counts.
    """
    found = _Layers()
    found.add(schedule.main, "")
    return 2 * found.largest


class _Layers:
    """The largest layer of a schedule; each routine is looked at once."""

    def __init__(self) -> None:
        self.largest = 0
        self._seen: set[tuple[Routine, str]] = set()
        self._loaded: dict[Routine, int] = {}
        self._depth: dict[Routine, int] = {}

    def add(self, routine: Routine, part: str) -> None:
        """Look at an activation that belongs to a part of the program."""
        if (routine, part) in self._seen:
            return
        self._seen.add((routine, part))
        alone: Counter[str] = Counter()
        for step in routine.steps:
            label = step.part or part
            if isinstance(step, Load):
                alone[label] += step.nbytes
            elif _repeats(step) and self.depth(calls(step)[0].routine) < 2:
                self.largest = max(self.largest, self.loaded(calls(step)[0].routine))
            else:
                for passed in calls(step):
                    self.add(passed.routine, label)
        self.largest = max(self.largest, *alone.values(), 0)

    def depth(self, routine: Routine) -> int:
        """How deep loops that load are nested in a routine."""
        if routine not in self._depth:
            inner = [
                self.depth(passed.routine) + _repeats(step)
                for step in routine.steps
                for passed in calls(step)
                if self.loaded(passed.routine)
            ]
            self._depth[routine] = max(inner, default=0)
        return self._depth[routine]

    def loaded(self, routine: Routine) -> int:
        """Bytes of entries that an activation loads, each loop inside it run once."""
        if routine not in self._loaded:
            self._loaded[routine] = sum(map(self._by, routine.steps))
        return self._loaded[routine]

    def _by(self, step: Step) -> int:
        if isinstance(step, Load):
            return step.nbytes
        return max((self.loaded(passed.routine) for passed in calls(step)), default=0)


def _repeats(step: Step) -> bool:
    return isinstance(step, Loop) and step.count > 1
