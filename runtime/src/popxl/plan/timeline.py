"""Timeline of a simulated run: time, exposed transfers and peak memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, get_args

from popxl._schedule.lookahead import default_prefetch_window
from popxl._schedule.schedule import Schedule
from popxl._schedule.segment import Segment
from popxl.plan.gc_pause import gc_disabled
from popxl.plan.loop_extrapolation import measure_extrapolated
from popxl.plan.rates import Rates
from popxl.plan.segment_cost import SegmentCost, trace_cost
from popxl.plan.simulated_device import (
    STREAMS,
    SimulatedDevice,
    Stream,
    StreamActivity,
    drive_device,
)

_FIRST = 2  # iterations of a long loop until streams and disk are in a steady state


@dataclass(frozen=True)
class ExposedTime:
    """Seconds in which a device is idle, by what it waits for: transfers or dispatch.

    Attributes:
        transfers: it waits for loads, or the host waits for stores.
        dispatch: it waits for the host's dispatch.
    """

    transfers: float = 0.0
    dispatch: float = 0.0

    @property
    def seconds(self) -> float:
        return self.transfers + self.dispatch


@dataclass(frozen=True)
class Timeline:
    """Time, exposed transfers and memory of a simulated run on one device.

    Attributes:
        seconds: from the first dispatch to the end of the last transfer.
        compute_seconds: seconds in which segments run.
        exposed: the other seconds by region; those after the last computation count for the last
            region.
        peak: peak bytes of device memory, without variables and host streams: resident entries,
            intermediate values, entries and activations in transfer.
        extent: `peak` with the gaps that XLA's allocator leaves (`popxl.plan.device_allocator`).
        window: bytes that loads might be ahead (see `popxl._storage.prefetch`).
        spans: what each stream did; of a long loop in its first iterations
            (`popxl.plan.loop_extrapolation`).
    """

    seconds: float
    compute_seconds: float
    exposed: Mapping[str, ExposedTime]
    peak: int
    extent: int
    window: int
    spans: Sequence[StreamActivity]

    def extrapolate(self, shorter: Timeline, times: float) -> Timeline:
        """Returns this timeline plus `times` its difference from a shorter run's."""

        def extrapolate_value(longer_value: float, shorter_value: float) -> float:
            return longer_value + times * (longer_value - shorter_value)

        zero = ExposedTime()
        exposed = {
            part: ExposedTime(
                *map(
                    extrapolate_value,
                    astuple(longer_value),
                    astuple(shorter.exposed.get(part, zero)),
                )
            )
            for part, longer_value in self.exposed.items()
        }
        return replace(
            self,
            seconds=extrapolate_value(self.seconds, shorter.seconds),
            compute_seconds=extrapolate_value(self.compute_seconds, shorter.compute_seconds),
            exposed=exposed,
        )

    @property
    def loads(self) -> int:
        """Number of remote-buffer entries copied to the device in the run."""
        return sum(span.stream == "copies in" for span in self.spans)

    @property
    def exposed_transfers(self) -> float:
        """Seconds in which the device waits for transfers of remote-buffer entries."""
        return sum(exposed.transfers for exposed in self.exposed.values())

    def to_chrome_trace(self) -> dict[str, Any]:
        """Returns the stream activities in the format of Chrome's trace viewer and Perfetto."""
        threads = {name: i for i, name in enumerate(get_args(Stream), 1)}
        names: list[dict[str, Any]] = [
            {"ph": "M", "pid": 1, "tid": i, "name": "thread_name", "args": {"name": name}}
            for name, i in threads.items()
        ]
        return {"displayTimeUnit": "ms", "traceEvents": [
            *names, *(_trace_event(span, threads[span.stream]) for span in self.spans)
        ]}  # fmt: skip


def _trace_event(span: StreamActivity, thread: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": 1,
        "tid": thread,
        "name": span.name,
        "cat": span.part or "no part",
        "ts": 1e6 * span.start,
        "dur": 1e6 * (span.end - span.start),
        "args": {"part": span.part, "bytes": span.nbytes},
    }


def timeline(
    schedule: Schedule,
    rates: Rates,
    segment_costs: Mapping[Segment, SegmentCost] | None = None,
    window: int | None = None,
    temporaries: Callable[[Segment], int] | None = None,
) -> Timeline:
    """Simulates a run: the schedule executor drives a simulated device.

    A segment takes the time of `Cost.seconds`; the timeline adds exposed transfers and dispatch.
    Numbers that only devices know are taken to be 0, and streams are on the device.

    Args:
        segment_costs: costs of the segments; default: they are traced.
        window: bytes that loads may be ahead; default: two layers' entries.
        temporaries: returns the bytes of a segment's temporaries; default: the estimate.
    """
    if segment_costs is None:
        segment_costs = {segment: trace_cost(segment) for segment in schedule.segments}
    segment_works = segment_costs
    seconds = {segment: cost.seconds(rates) for segment, cost in segment_costs.items()}
    dispatch = {segment: cost.dispatch_seconds(rates) for segment, cost in segment_costs.items()}
    if temporaries is None:
        temporaries = lambda segment: segment_works[segment].temporaries  # noqa: E731
    if window is None:
        window = default_prefetch_window(schedule)

    def simulate_schedule(schedule: Schedule) -> Timeline:
        device = SimulatedDevice(rates, seconds.__getitem__, temporaries, dispatch.__getitem__)
        with gc_disabled():
            drive_device(schedule, device, window)
        device.finish_writes()
        return _timeline_of_device(device, window)

    short, long, times = measure_extrapolated(schedule, simulate_schedule, _FIRST, STREAMS)
    return long.extrapolate(short, times)


def _timeline_of_device(device: SimulatedDevice, window: int) -> Timeline:
    compute_seconds = [span for span in device.spans if span.stream == "compute"]
    exposed = {part: ExposedTime(*seconds) for part, seconds in device.exposed.items()}
    last = max((span.end for span in compute_seconds), default=0.0)
    before = exposed.get(device.part, ExposedTime())
    exposed[device.part] = ExposedTime(before.transfers + device.end - last, before.dispatch)
    return Timeline(
        seconds=device.end,
        compute_seconds=sum(span.end - span.start for span in compute_seconds),
        exposed=exposed,
        peak=device.peak,
        extent=device.allocator.extent,
        window=window,
        spans=device.spans,
    )
