"""Plan of a program from its Ir: tracing and totals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING

from popxl._run.program import Program, make_program_context
from popxl._schedule.lookahead import default_prefetch_window
from popxl._schedule.schedule import Schedule
from popxl._schedule.schedule_builder import build_schedule
from popxl._schedule.schedule_walk import count_segment_runs
from popxl._schedule.segment import Segment
from popxl.ir import Ir
from popxl.plan.cost_memo import costs_of_segments
from popxl.plan.cost_walk import CostWalk
from popxl.plan.gc_pause import gc_disabled
from popxl.plan.loop_extrapolation import truncate_loops
from popxl.plan.records import MemoryUse, Plan
from popxl.plan.segment_cost import SegmentCost
from popxl.plan.storage import Storage, storage_of

if TYPE_CHECKING:
    from popxl.plan.rates import Rates
    from popxl.plan.time_estimate import StagedTimeEstimate
    from popxl.plan.timeline import Timeline


@dataclass(frozen=True)
class TracedProgram:
    """A program traced for a platform, from which its plan and timeline are computed.

    The current placement of its remote buffers is read at that time.
    """

    ir: Ir
    schedule: Schedule
    segment_costs: Mapping[Segment, SegmentCost]
    temporaries: Callable[[Segment], int]
    _estimates: list[StagedTimeEstimate] = field(
        init=False, repr=False, compare=False, default_factory=list
    )

    def permanent_storage(self) -> Storage:
        """Returns the bytes that the program stores permanently (see `storage_of`)."""
        return storage_of(self.ir)

    def plan(self) -> Plan:
        """Returns the plan of the program: memory and work of a run."""
        walk = CostWalk(self.segment_costs, self.temporaries)
        peak = walk.run(self.schedule)
        stored = self.permanent_storage()
        return Plan(
            replicas=self.ir.replication_factor,
            parts=walk.parts(),
            variables=stored.variables,
            streams=stored.streams,
            temporaries=peak,
            remote=stored.remote,
            disk=stored.disk,
            resident=stored.resident,
        )

    @cached_property
    def default_prefetch_window(self) -> int:
        """Default prefetch window in bytes (see `popxl.Ir.load_window`)."""
        return default_prefetch_window(self.schedule)

    @property
    def largest_temporary_bytes(self) -> int:
        """Bytes of the temporaries of the segment that has most of them."""
        return max(map(self.temporaries, self.schedule.segments), default=0)

    @cached_property
    def segment_runs(self) -> Mapping[Segment, int]:
        """Number of times that a run executes each segment."""
        return count_segment_runs(self.schedule)

    def busy_seconds(self, rates: Rates) -> tuple[float, float]:
        """Returns the seconds that the device computes in a run, and the host dispatches segments.

        A run takes at least as long as each of them.
        """
        runs = [(self.segment_costs[segment], n) for segment, n in self.segment_runs.items()]
        computes = sum(n * cost.seconds(rates) for cost, n in runs)
        return computes, sum(n * cost.dispatch_seconds(rates) for cost, n in runs)

    def truncate_loops(self, max_iterations: int) -> TracedProgram:
        """Returns the program with at most `max_iterations` iterations per loop, for simulation."""
        return replace(self, schedule=truncate_loops(self.schedule, max_iterations))

    def staged_time_estimate(self, rates: Rates, window: int) -> StagedTimeEstimate:
        """Returns a stage-wise time estimate of a run with all buffer entries in host memory."""
        for known in self._estimates:
            if known.rates == rates:
                return known.copy(window)
        from popxl.plan.time_estimate import StagedTimeEstimate

        estimate = StagedTimeEstimate.from_schedule(
            self.schedule, self.segment_costs, rates, window
        )
        self._estimates.append(estimate)
        return estimate.copy(window)

    def timeline(self, rates: Rates, window: int | None = None) -> Timeline:
        """Simulates a run on one device and returns its timeline.

        Args:
            window: bytes that loads may be ahead; default: the program's.
        """
        from popxl.plan.timeline import timeline

        window = self.ir.load_window if window is None else window
        return timeline(self.schedule, rates, self.segment_costs, window, self.temporaries)


def trace_program(ir: Ir, target: str = "cpu") -> TracedProgram:
    """Traces the program of `ir`; needs no devices and allocates neither weights nor state.

    Args:
        target: that the program is traced for: "cpu", "gpu", "tpu", or a GPU with its compute
            capability, as "gpu 9.0".
    """
    schedule = build_schedule(ir)
    context = make_program_context(schedule, ir, target)
    for segment in schedule.segments:
        segment.context = context
    with gc_disabled():
        segment_costs = costs_of_segments(ir, schedule.segments)
    return TracedProgram(
        ir, schedule, segment_costs, lambda segment: segment_costs[segment].temporaries
    )


def plan_of(ir: Ir, target: str = "cpu") -> Plan:
    """Returns the plan of the program of `ir`: memory and work of a run.

    Sums of operations and traffic are exact, and so is the memory that the schedule keeps on a
    device; XLA's temporaries are estimated (`popxl.plan.memory_estimate`), since nothing is
    compiled.

    Args:
        target: as for `trace_program`.

    Example:
        >>> plan = popxl.plan.plan_of(ir)
        >>> print(plan.host_bytes, plan.device_bytes, plan.flops)
    """
    return trace_program(ir, target).plan()


def plan_of_program(program: Program) -> Plan:
    """Returns the plan of a compiled program, with XLA's temporaries as compiled."""
    segment_costs = costs_of_segments(program.ir, program.schedule.segments)
    return TracedProgram(
        program.ir, program.schedule, segment_costs, _compiled_temporaries(program)
    ).plan()


def memory_use(program: Program) -> MemoryUse:
    """Returns the memory use of one replica of a compiled program."""
    stored = storage_of(program.ir)
    return MemoryUse(
        variables=stored.variables,
        streams=stored.streams,
        temporaries=CostWalk({}, _compiled_temporaries(program)).run(program.schedule),
        remote=stored.remote,
        disk=stored.disk,
        resident=stored.resident,
    )


def _compiled_temporaries(program: Program) -> Callable[[Segment], int]:
    """Returns a function from a compiled segment to the bytes of its temporaries."""

    @cache
    def temporary_bytes(segment: Segment) -> int:
        return program.executables[segment].memory_analysis().temp_size_in_bytes

    return temporary_bytes
