"""How devices share training: data-parallel copies of the model, and tensor-parallel devices in
each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from config.errors import ConfigError
from config.layers import LAYOUT, MICRO, largest_divisor
from config.sections import RunConfig
from planning.hardware.machines import Machine
from planning.placement_search import plans_placement, run_trial
from planning.program_variants import VariantCache
from planning.roofline import resource_times

MOST_SAVED = 0.3
"""Of the first simulated step's time: more than is saved by not recomputing, by other passes and
by other activations between layers together."""


@dataclass(frozen=True)
class ParallelLayout:
    """A configuration for some devices.

    Attributes:
        seconds: of a step in which all micro-batches pass a layer before the next one, and
            activations are recomputed; on a CPU, of its bound.
        fits: whether that step does.
    """

    config: RunConfig
    seconds: float
    fits: bool

    def may_be_below(self, seconds: float) -> bool:
        """Whether its fastest program could be faster than that."""
        return (1 - MOST_SAVED) * self.seconds < seconds


def list_layouts(config: RunConfig, devices: int, micro: int | None = None) -> Sequence[RunConfig]:
    """All ways in which the batch and the model's sizes allow to use some devices; of fewer devices
    where there is none.

    Args:
        micro: samples of a micro-batch without tensor parallelism, at most; each device of a group
            adds as many, so that its share of the work is the same. None: always those of `config`.
    """
    counts = range(devices, 0, -1)
    return next(found for n in counts if (found := list(_list_for_devices(config, n, micro))))


def _list_for_devices(config: RunConfig, devices: int, micro: int | None) -> Iterator[RunConfig]:
    """In order of tensor-parallel devices."""
    batch, size = config.training.global_batch_size, config.execution.micro_batch_size
    for parts in range(1, devices + 1):
        copies = devices // parts
        if devices % parts or batch % copies:
            continue
        if micro is not None:
            size = largest_divisor(batch // copies, micro * parts)
        try:
            yield config.changed(dict(zip((*LAYOUT, MICRO), (copies, parts, size), strict=True)))
        except ConfigError:  # samples, heads or features that so many devices cannot share
            continue


def promising_layouts(
    configs: Sequence[RunConfig], on: Machine, programs: VariantCache
) -> list[ParallelLayout]:
    """The layouts that could be the fastest, in the order of their first simulated steps. Those
    whose bound is too long already are not simulated."""
    found = list[ParallelLayout]()
    for bound in sorted((_bound(each, on, programs) for each in configs), key=lambda b: b.seconds):
        if all(bound.may_be_below(other.seconds) for other in found):
            found.append(_simulated(bound, on, programs))
    return sorted(found, key=lambda layout: (not layout.fits, layout.seconds))


def _bound(config: RunConfig, on: Machine, programs: VariantCache) -> ParallelLayout:
    """A layout at the rates that programs reach, with everything hidden behind the slowest."""
    _, traced = programs.variants(config, on.target).get()
    rates = on.achieved_rates(config.model.precision, config.replicas)
    return ParallelLayout(
        config, sum(resource_times(part, rates).seconds for part in traced.plan().parts), True
    )


def _simulated(layout: ParallelLayout, on: Machine, programs: VariantCache) -> ParallelLayout:
    if on.platform == "cpu" or not plans_placement(layout.config):
        return layout
    first = run_trial(programs.variants(layout.config, on.target), layout.config, on)
    return ParallelLayout(layout.config, first.seconds, first.fits)
