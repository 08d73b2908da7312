"""Parallel layouts: data parallelism × tensor parallelism on a number of devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from config.config_sources import LAYOUT, MICRO, largest_divisor
from config.errors import ConfigError
from config.sections import RunConfig
from planning.hardware.machines import Machine
from planning.placement_search import simulate_trial
from planning.program_variants import VariantCache, plans_placement
from planning.roofline import bound_seconds

MAX_SPEEDUP = 0.3
"""Upper bound on the fraction of the first simulated step that saved activations, other passes and
other activations between layers can save."""


@dataclass(frozen=True)
class ParallelLayout:
    """A configuration with given data and tensor parallelism, and the seconds of its step.

    Attributes:
        seconds: simulated time of a step in one pass that recomputes activations; on a CPU, its
            lower bound.
        fits: true if that step fits.
    """

    config: RunConfig
    seconds: float
    fits: bool

    def can_be_faster_than(self, seconds: float) -> bool:
        """Return True if the layout's fastest program can take less than `seconds` per step."""
        return (1 - MAX_SPEEDUP) * self.seconds < seconds


def list_layouts(config: RunConfig, devices: int, micro: int | None = None) -> Sequence[RunConfig]:
    """Return the layouts on `devices` devices that are possible with the batch and model sizes.

    If there is none, the layouts are those of the next smaller number of devices.

    Args:
        micro: largest micro-batch per tensor-parallel device; None: the micro-batch of `config`.
    """
    counts = range(devices, 0, -1)
    return next(configs for n in counts if (configs := list(_list_for_devices(config, n, micro))))


def _list_for_devices(config: RunConfig, devices: int, micro: int | None) -> Iterator[RunConfig]:
    """Iterate over the layouts on exactly `devices` devices, by increasing tensor parallelism."""
    batch, size = config.training.global_batch_size, config.execution.micro_batch_size
    for tp in range(1, devices + 1):
        dp = devices // tp
        if devices % tp or batch % dp:
            continue
        if micro is not None:
            size = largest_divisor(batch // dp, micro * tp)
        try:
            yield config.with_values(dict(zip((*LAYOUT, MICRO), (dp, tp, size), strict=True)))
        except ConfigError:  # samples, heads or features do not divide
            continue


def select_promising_layouts(
    configs: Sequence[RunConfig], machine: Machine, programs: VariantCache
) -> list[ParallelLayout]:
    """Return the layouts that can be the fastest, by one simulated training step of each.

    Layouts whose lower bound is too long are not simulated.
    """
    simulated = list[ParallelLayout]()
    for bound in sorted(
        (_step_lower_bound(config, machine, programs) for config in configs),
        key=lambda b: b.seconds,
    ):
        if all(bound.can_be_faster_than(other.seconds) for other in simulated):
            simulated.append(_simulate_layout(bound, machine, programs))
    return sorted(simulated, key=lambda layout: (not layout.fits, layout.seconds))


def _step_lower_bound(
    config: RunConfig, machine: Machine, programs: VariantCache
) -> ParallelLayout:
    """Return a layout with a lower bound on its training step's seconds: the slowest resource."""
    _, traced = programs.variants(config, machine.target).get_program()
    rates = machine.achieved_rates(config.model.precision, config.num_replicas)
    return ParallelLayout(config, bound_seconds(traced.plan().parts, rates), True)


def _simulate_layout(
    layout: ParallelLayout, machine: Machine, programs: VariantCache
) -> ParallelLayout:
    """Return a layout with the seconds of its training step, simulated."""
    if machine.platform == "cpu" or not plans_placement(layout.config):
        return layout
    first = simulate_trial(programs.variants(layout.config, machine.target), layout.config, machine)
    return ParallelLayout(layout.config, first.seconds, first.fits)
