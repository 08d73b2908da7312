"""The report of a plan on a machine: times by phase, memory and advice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import inf
from typing import Any

import popxl
from planning.hardware.disk_offload import PROCESS_BYTES, io_buffer_bytes
from planning.hardware.machines import Machine
from planning.length_buckets import simulate_buckets
from planning.placement_search import PlacementResult, PlacementTrial, try_without_memory_options
from planning.requirements import (
    Requirements,
    plan_on_machine,
    streamed_requirements,
    usable_host_bytes_on,
)
from planning.roofline import ResourceTimes, bound_seconds, resource_times

REST = "the rest"


@dataclass(frozen=True)
class PhaseRow:
    """Times and traffic of one phase in one direction (forward, backward, update) on a device.

    Attributes:
        phase, direction: from the label `phase/direction`; direction "" without one.
        part: cost of the region.
        times: seconds by resource.
    """

    phase: str
    direction: str
    part: popxl.plan.RegionCost
    times: ResourceTimes


@dataclass(frozen=True)
class LargerBatchAdvice:
    """Advice in a plan: a larger batch size, with which the devices are busy.

    Attributes:
        samples: samples of a step.
        gain: estimated factor of the samples per second.
    """

    samples: int
    gain: float


@dataclass(frozen=True)
class FasterSetting:
    """Advice in a plan: a setting with a faster step, or with which alone the program fits.

    Attributes:
        field: dotted name of the field.
        seconds: seconds of a simulated step.
    """

    field: str
    value: str | int
    seconds: float


@dataclass(frozen=True)
class PlanReport:
    """A plan of a program on a machine: memory, times by phase and advice.

    Attributes:
        rows: costs by phase, in order of execution.
        achieved: rates of the machine that programs achieve.
        timeline: a simulated run; None if host and devices share their memory, and nothing is on
            disk.
        without_memory_options: the trial without options that only save memory, if it fits.
        larger_batch: see `planning.batch_size_advice`.
        faster_settings: see `planning.speed_advice`.
        bucket_seconds: expected seconds of a run by length of the shorter buckets.
    """

    preset: str
    requirements: Requirements
    machine: Machine
    rows: Sequence[PhaseRow]
    achieved: popxl.plan.Rates
    timeline: popxl.plan.Timeline | None = None
    without_memory_options: PlacementTrial | None = None
    larger_batch: LargerBatchAdvice | None = None
    faster_settings: Sequence[FasterSetting] = ()
    bucket_seconds: Mapping[int, float] = field(default_factory=dict)

    @property
    def plan(self) -> popxl.plan.Plan:
        """Costs and memory of the program, from its trace."""
        return self.requirements.plan

    @property
    def trains(self) -> bool:
        """True if the program trains."""
        return self.requirements.kind == "finetuning"

    @property
    def hosts(self) -> int:
        """Number of hosts that the program's devices belong to."""
        return self.machine.hosts(self.plan.replicas)

    @property
    def bytes_per_host(self) -> int:
        """Bytes of remote buffers on one host that uses all of its devices."""
        return self.plan.remote * self._replicas_per_host

    @property
    def disk_per_host(self) -> int:
        """Bytes of remote buffer entries that one host stores on disk."""
        return self.plan.disk * self._replicas_per_host

    @property
    def _replicas_per_host(self) -> int:
        replicas = self.plan.replicas
        return min(replicas, self.machine.devices or replicas)

    @property
    def memory_use(self) -> dict[str, tuple[float, float]]:
        """Needed and available bytes, by memory: device, host and disk.

        `execution.host_memory` limits those of the host.
        """
        machine, plan = self.machine, self.plan
        host = usable_host_bytes_on(self.requirements.config, machine)
        limited = plan.disk or host < machine.host_memory  # which holds the program, too
        other_bytes = (PROCESS_BYTES if limited else 0) + (
            io_buffer_bytes(self.requirements.config) if plan.disk else 0
        )
        disk = {"disk": (float(self.disk_per_host), machine.disk)} if plan.disk else {}
        if machine.devices is None:  # virtual devices are in the host's memory
            needed = plan.host_bytes + plan.device_bytes * plan.replicas + other_bytes
            return {"memory": (needed, host)} | disk
        if machine.one_memory:
            needed = self.device_bytes + self.bytes_per_host + other_bytes
            return {"memory": (needed, min(machine.usable_bytes, host))} | disk
        return {
            "device memory": (self.device_bytes, machine.usable_bytes),
            "host memory": (self.bytes_per_host + other_bytes, host),
        } | disk

    @property
    def device_bytes(self) -> int:
        """Device memory in bytes of one replica, transfer buffers and fragmentation included."""
        if self.timeline is None or self.machine.platform == "cpu":
            return self.plan.device_bytes
        return self.plan.fixed_device_bytes + self.timeline.extent

    @property
    def fits(self) -> bool:
        """True if the program fits each memory of the machine."""
        return all(needed <= available for needed, available in self.memory_use.values())

    @property
    def expected_seconds(self) -> float:
        """Seconds of a run of the program: simulated, or else the bound at achieved rates."""
        if self.timeline is not None:
            return self.timeline.seconds
        return bound_seconds((row.part for row in self.rows), self.achieved)

    @property
    def tokens_per_second(self) -> float:
        """`Requirements.tokens` per second of `expected_seconds`."""
        return self.requirements.tokens / self.expected_seconds

    @property
    def seconds(self) -> float:
        """Lower bound on the seconds of a run of the program, at peak rates."""
        return sum(row.times.seconds for row in self.rows)

    @property
    def utilisation(self) -> float:
        """Fraction of the lower bound on time in which matrix units work at their peak rate."""
        return self._utilisation(self.seconds)

    @property
    def simulated_utilisation(self) -> float | None:
        """Fraction of the simulated run in which matrix units work at their peak rate."""
        return None if self.timeline is None else self._utilisation(self.timeline.seconds)

    def _utilisation(self, seconds: float) -> float:
        return sum(row.times.compute for row in self.rows) / seconds if seconds else 0.0

    def seconds_to_beat(self, gain: float) -> float:
        """Return the seconds of a step faster by `gain`; infinity if the plan does not fit."""
        result = self.requirements.placement_result
        return (1 - gain) * result.best.seconds if result is not None and self.fits else inf

    def idle_time(self, row: PhaseRow) -> popxl.plan.ExposedTime:
        """Return the seconds in which the device idles during a phase of the simulated run."""
        by_label = {} if self.timeline is None else self.timeline.exposed
        return by_label.get(row.part.name, popxl.plan.ExposedTime())

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON data."""
        requirements, plan = self.requirements, self.plan
        return {
            "preset": self.preset,
            "program": requirements.kind,
            "machine": self.machine.name,
            "fits": self.fits,
            "replicas": plan.replicas,
            "hosts": self.hosts,
            "parameters": requirements.parameters,
            "samples": requirements.samples,
            "flops_per_sample": requirements.flops_per_sample,
            "state_bytes": requirements.state,
            "host_bytes": plan.host_bytes,
            "bytes_per_host": self.bytes_per_host,
            "disk_per_host": self.disk_per_host,
            "device_bytes": self.device_bytes,
            "device_variables": plan.variables,
            "device_streams": plan.streams,
            "device_temporaries": plan.temporaries,
            "seconds": self.seconds,
            "samples_per_second": requirements.samples / self.seconds if self.seconds else None,
            "tokens_per_second": self.tokens_per_second if self.seconds else None,
            "weights": "streamed" if requirements.streamed else None,
            "utilisation": self.utilisation,
            "length_buckets": dict(self.bucket_seconds),
            "simulated": None if self.timeline is None else _timeline_as_dict(self, self.timeline),
            "larger_batch": None if self.larger_batch is None else asdict(self.larger_batch),
            "faster_settings": [asdict(setting) for setting in self.faster_settings],
            "execution": asdict(requirements.config.execution),
            "placement": None
            if requirements.placement is None
            else _placement_as_dict(requirements.placement),
            "activations": None
            if requirements.placement_result is None
            else _trials_as_dicts(requirements.placement_result),
            "phases": [
                _row_as_dict(row) | {"exposed": asdict(self.idle_time(row))} for row in self.rows
            ],
        }


def make_report(preset: str, requirements: Requirements, machine: Machine) -> PlanReport:
    """Plan a program on a machine, and return the plan's report.

    Generation with `generation.weights` auto is planned with streamed weights if resident ones do
    not fit, as it runs (`planning.generation_placement`).
    """
    report = _make_report(preset, requirements, machine)
    streamed = None if report.fits else streamed_requirements(requirements, machine.target)
    return report if streamed is None else _make_report(preset, streamed, machine)


def _make_report(preset: str, requirements: Requirements, machine: Machine) -> PlanReport:
    requirements = plan_on_machine(requirements, machine)
    precision, replicas = requirements.config.model.precision, requirements.plan.replicas
    rates, achieved = (
        machine.rates(precision, replicas),
        machine.achieved_rates(precision, replicas),
    )
    rows = []
    for part in requirements.plan.parts:
        phase, _, direction = part.name.partition("/")
        row = PhaseRow(phase or REST, direction, part, resource_times(part, rates))
        rows.append(row)
    timeline = None
    if requirements.placement is not None and not requirements.plan.disk:
        timeline = requirements.placement.timeline
    elif machine.platform != "cpu" or requirements.plan.disk:
        timeline = requirements.traced.timeline(achieved)
    faster_trial = None
    if requirements.variants is not None and requirements.placement_result is not None:
        faster_trial = try_without_memory_options(
            requirements.variants, requirements.config, machine, requirements.placement_result.best
        )
    return PlanReport(
        preset, requirements, machine, rows, achieved, timeline, faster_trial,
        bucket_seconds=simulate_buckets(requirements, machine),
    )  # fmt: skip


def _placement_as_dict(placement: popxl.plan.Placement) -> dict[str, Any]:
    return {
        "seconds_with_all_in_host_memory": placement.all_host_timeline.seconds,
        "room_bytes": placement.free_bytes,
        "kinds": [asdict(kind) for kind in placement.kinds],
    }


def _trials_as_dicts(result: PlacementResult) -> list[dict[str, Any]]:
    return [
        {
            "micro_batches_per_pass": trial.variant.per_pass,
            "saved_layers": dict(sorted(trial.variant.saved_layers)),
            "saves_matmul_inputs": trial.variant.saves_matmul_inputs,
            "seconds": trial.seconds,
            "fits": trial.fits,
        }
        for trial in result.tried
    ]


def _timeline_as_dict(report: PlanReport, timeline: popxl.plan.Timeline) -> dict[str, Any]:
    return {
        "seconds": timeline.seconds,
        "samples_per_second": report.requirements.samples / timeline.seconds,
        "utilisation": report.simulated_utilisation,
        "exposed_transfers": timeline.exposed_transfers,
        "window_bytes": timeline.window,
    }


def _row_as_dict(row: PhaseRow) -> dict[str, Any]:
    collectives = [asdict(c) | {"sent": c.sent} for c in row.part.collectives]
    costs = asdict(row.part) | {"collectives": collectives, "code_loads": row.part.code_loads}
    del costs["name"]
    seconds = asdict(row.times) | {
        "estimate": row.times.seconds,
        "bound": row.times.bottleneck,
    }
    return {"phase": row.phase, "direction": row.direction} | costs | {"seconds": seconds}
