"""Timing of a program's labelled regions, measured by the host while it executes the schedule.

A run is asynchronous: its times are how long the host takes to dispatch, and how long it waits.
With `Timing.synchronize` the host waits for each step before it dispatches the next one: its times
are each step's own, and nothing overlaps.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax

from popxl._schedule.schedule import Branch, Fetch, Load, Loop, Run, Step, Store

if TYPE_CHECKING:
    from popxl._schedule.schedule_walk import Steps
    from popxl._storage.prefetch import PrefetchMover
    from popxl._storage.shared_memory_mover import SharedMemoryMover


@dataclass
class TimingSums:
    """Count, host seconds and wait seconds of one kind of schedule step (loads, runs, ...).

    Attributes:
        count: steps of the schedule.
        seconds: time of the host, without waiting.
        wait_seconds: seconds that the host waited for the devices.
    """

    count: int = 0
    seconds: float = 0.0
    wait_seconds: float = 0.0

    def add(self, seconds: float, wait_seconds: float) -> None:
        self.count += 1
        self.seconds += seconds
        self.wait_seconds += wait_seconds


@dataclass
class RegionTimes:
    """Times of one labelled region (see `popxl.plan.part`), on the host's clock.

    Attributes:
        loads, stores: transfers from and to remote buffers.
        runs: segments.
        host_steps: numbers of the host, also those it fetches from the devices.
    """

    loads: TimingSums = field(default_factory=TimingSums)
    runs: TimingSums = field(default_factory=TimingSums)
    stores: TimingSums = field(default_factory=TimingSums)
    host_steps: TimingSums = field(default_factory=TimingSums)

    @property
    def sums(self) -> tuple[TimingSums, ...]:
        return self.loads, self.runs, self.stores, self.host_steps

    @property
    def seconds(self) -> float:
        """Seconds of a region in which the host did not wait for the devices."""
        return sum(sums.seconds for sums in self.sums)

    @property
    def wait_seconds(self) -> float:
        """Seconds of a region in which the host waited for the devices."""
        return sum(sums.wait_seconds for sums in self.sums)


@dataclass
class Timing:
    """Times of the program runs inside a `Session.timing` context.

    Attributes:
        synchronize: the host waited for each step of the schedule before the next.
        parts: by label, in order of execution; "" is what is in no part. Labels of a segment that
            ops of several parts share are joined by " + ".
        segments: by name.
        num_runs: runs of the program.
        seconds: of these runs in all, including transfers of inputs and outputs, which are in no
            part.
    """

    synchronize: bool = False
    parts: dict[str, RegionTimes] = field(default_factory=dict)
    segments: dict[str, TimingSums] = field(default_factory=dict)
    num_runs: int = 0
    seconds: float = 0.0

    @contextmanager
    def measure_run(self) -> Iterator[None]:
        """Context that measures one run of the program."""
        start = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - start
        self.num_runs += 1


class Timer:
    """Measures schedule steps as they execute, and labels them in a profiler's trace."""

    def __init__(self, timing: Timing, mover: SharedMemoryMover | PrefetchMover) -> None:
        self._timing, self._mover = timing, mover

    def __call__(self, steps: Steps) -> Steps:
        """Yields the steps unchanged and times each one: an observer of `schedule_walk`."""
        for step, frame in steps:
            if isinstance(step, (Loop, Branch)):
                yield step, frame
                continue
            label = frame.region_label(step)
            before, start = self._mover.wait_seconds, time.perf_counter()
            with jax.profiler.TraceAnnotation(label or "no part"):
                yield step, frame
                if self._timing.synchronize:
                    self._wait_for_transfer(step, frame.registers)
            seconds = time.perf_counter() - start
            wait_seconds = seconds if isinstance(step, Fetch) else self._mover.wait_seconds - before
            self._record(step, label, seconds - wait_seconds, wait_seconds)

    def _record(self, step: Step, label: str, seconds: float, wait_seconds: float) -> None:
        part = self._timing.parts.setdefault(label, RegionTimes())
        match step:
            case Load():
                part.loads.add(seconds, wait_seconds)
            case Store():
                part.stores.add(seconds, wait_seconds)
            case Run():
                part.runs.add(seconds, wait_seconds)
                segments = self._timing.segments
                segments.setdefault(step.segment.name, TimingSums()).add(seconds, wait_seconds)
            case _:
                part.host_steps.add(seconds, wait_seconds)

    def _wait_for_transfer(self, step: Step, registers: list[Any]) -> None:
        """Waits for a load or store that is timed; the program itself waits for its segments."""
        match step:
            case Load():
                jax.block_until_ready(registers[step.out])
            case Store():
                self._mover.wait_for_store(step, registers[step.entry_index])
