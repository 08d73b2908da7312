"""Look-ahead events of a run (loads, stores, segment runs), computed once per schedule."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from popxl._schedule.lookahead import LookaheadEvent, static_events

if TYPE_CHECKING:
    from popxl._schedule.schedule import Schedule

_KNOWN: WeakKeyDictionary[Schedule, Sequence[LookaheadEvent | None]] = WeakKeyDictionary()


def events_of_run(schedule: Schedule) -> Sequence[LookaheadEvent]:
    """Returns a run's loads, stores and segment runs in order; scalars from devices count as 0."""
    return list(filter(None, _cached_events(schedule)))


def lookahead_events(schedule: Schedule, fetched: deque[Any]) -> Iterator[LookaheadEvent | None]:
    """Yields a run's loads, stores and segment runs; None until a fetched scalar is available."""
    for event in _cached_events(schedule):
        if event is None:
            while not fetched:
                yield None
            fetched.popleft()
        else:
            yield event


def _cached_events(schedule: Schedule) -> Sequence[LookaheadEvent | None]:
    """Returns a run's loads, stores and segment runs, with None where a scalar is fetched."""
    if schedule not in _KNOWN:
        _KNOWN[schedule] = tuple(static_events(schedule))
    return _KNOWN[schedule]
