"""A fake device: its streams are threads that sleep, under the rules of XLA's GPU client.

It stands in for a GPU where the walker is compared with the simulation of it, which knows only
clocks (`popxl.plan.simulated_device`). What waits for what follows from events between threads, and
when the host gets to dispatch from the time that it takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from threading import BoundedSemaphore, Event, Thread
from types import TracebackType
from typing import Any

from popxl._schedule.segment import Segment, nbytes_of, result_specs
from popxl.plan import Rates


class Due(Event):
    """Something that is over at a time of `time.perf_counter`, which is known once it is set. It is
    set somewhat later, by as much as a thread takes to wake up."""

    at = 0.0


_DONE = Due()
_DONE.set()


class Array:
    """An array that is there once its event is set."""

    def __init__(self, nbytes: int, there: Due = _DONE) -> None:
        self.nbytes, self.there, self._deleted = nbytes, there, False

    def is_deleted(self) -> bool:
        return self._deleted

    def is_ready(self) -> bool:
        return self.there.is_set()

    def block_until_ready(self) -> Array:
        self.there.wait()
        return self

    def delete(self) -> None:
        self._deleted = True


class Stream:
    """A thread that does one task after the other."""

    def __init__(self) -> None:
        self._end = 0.0
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()

    def add(self, waits: Sequence[Due], seconds: Sequence[float]) -> list[Due]:
        """Sleep once all of `waits` are set, several times in a row; sets an event after each.

        A task begins when what it waits for was due, so that lateness does not add up.
        """
        over, dispatched = [Due() for _ in seconds], time.perf_counter()

        def task() -> None:
            for event in waits:
                event.wait()
            self._end = max(self._end, dispatched, *(event.at for event in waits))
            for each, event in zip(seconds, over, strict=True):
                self._end += each
                time.sleep(max(self._end - time.perf_counter(), 0.0))
                event.at = self._end
                event.set()

        self._tasks.put(task)
        return over

    def then(self, task: Callable[[], None]) -> None:
        """Do something, which takes no time, after what was added."""
        self._tasks.put(task)

    def stop(self) -> None:
        self._tasks.put(None)
        self._thread.join()


class ThreadDevice:
    """A device simulated by threads: see `popxl.plan.simulated_device.DrivenDevice`.

    Attributes:
        ends: when the last segment of each part of the program was done, in seconds since the
            first dispatch.
    """

    has_own_memory = True

    def __init__(self, rates: Rates, seconds: Callable[[Segment], float]) -> None:
        self._rates, self._seconds = rates, seconds
        self._compute, self._in, self._out = Stream(), Stream(), Stream()
        self._enqueued = BoundedSemaphore(rates.max_in_flight)
        self._last = _DONE  # of the segments that were dispatched
        self._start: float | None = None
        self.part = ""
        self.ends: dict[str, float] = {}

    def __enter__(self) -> ThreadDevice:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for stream in (self._compute, self._in, self._out):
            stream.stop()

    def create_array(self, nbytes: int, on_device: bool) -> Array:
        return Array(nbytes)

    def read(self, entry: Array) -> None:
        raise NotImplementedError("it has no disk")

    write = read

    def run_segment(self, segment: Segment, arguments: Sequence[Any]) -> list[Array]:
        self._begin()
        self._enqueued.acquire()
        there = [a.there for a in arguments if isinstance(a, Array)]
        (self._last,) = self._compute.add(there, [self._seconds(segment)])
        part, over = self.part, self._last
        self._compute.then(lambda: self._done(part, over.at))
        for i in segment.donated:
            arguments[i].delete()
        sizes = [nbytes_of([spec]) for spec in segment.result_specs]
        others = len(result_specs(segment)) - len(sizes)
        return [Array(nbytes, self._last) for nbytes in sizes + [0] * others]

    def _begin(self) -> None:
        if self._start is None:
            self._start = time.perf_counter()

    def _done(self, part: str, end: float) -> None:
        assert self._start is not None
        self.ends[part] = end - self._start
        self._enqueued.release()

    def put_number(self, value: int, spec: Any) -> None:
        """Numbers are on the device."""

    def copy_array(self, array: Array) -> Array:
        seconds = 2 * array.nbytes / self._rates.bandwidth
        (self._last,) = self._compute.add([array.there], [seconds])
        return Array(array.nbytes, self._last)

    def transfer_arrays(self, arrays: Sequence[Array], to: Sequence[str]) -> list[Array]:
        assert len(set(to)) == 1
        self._begin()
        stream = self._in if to[0] == "device" else self._out
        seconds = [self._rates.copy_latency_s + a.nbytes / self._rates.host_link for a in arrays]
        over = stream.add([*(a.there for a in arrays), self._last], seconds)
        return [Array(a.nbytes, event) for a, event in zip(arrays, over, strict=True)]
