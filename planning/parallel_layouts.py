"""How devices share training: data-parallel copies of the model, and tensor-parallel devices in
each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from config.errors import ConfigError
from config.layers import LAYOUT, MICRO, largest_divisor
from config.sections import RunConfig
from planning.hardware.machines import Machine
from planning.placement_search import is_automatic, trial
from planning.program_variants import Programs
from planning.roofline import times

MOST_SAVED = 0.3
"""Of the first simulated step's time: more than is saved by not recomputing, by other passes and
by other activations between layers together."""


@dataclass(frozen=True)
class Layout:
    """A configuration for some devices.

    Attributes:
        seconds: of a step in which all micro-batches pass a layer before the next one, and
            activations are recomputed; on a CPU, of its bound.
        fits: whether that step does.
    """

    config: RunConfig
    seconds: float
    fits: bool

    def can_take(self, seconds: float) -> bool:
        """Whether its fastest program could be faster than that."""
        return (1 - MOST_SAVED) * self.seconds < seconds


def layouts(config: RunConfig, devices: int, micro: int | None = None) -> Sequence[RunConfig]:
    """All ways in which the batch and the model's sizes allow to use some devices; of fewer devices
    where there is none.

    Args:
        micro: samples of a micro-batch without tensor parallelism, at most; each device of a group
            adds as many, so that its share of the work is the same. None: always those of `config`.
    """
    counts = range(devices, 0, -1)
    return next(found for n in counts if (found := list(_of_all(config, n, micro))))


def _of_all(config: RunConfig, devices: int, micro: int | None) -> Iterator[RunConfig]:
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


def promising(configs: Sequence[RunConfig], on: Machine, programs: Programs) -> list[Layout]:
    """The layouts that could be the fastest, in the order of their first simulated steps. Those
    whose bound is too long already are not simulated."""
    found = list[Layout]()
    for bound in sorted((_bound(each, on, programs) for each in configs), key=lambda b: b.seconds):
        if all(bound.can_take(other.seconds) for other in found):
            found.append(_simulated(bound, on, programs))
    return sorted(found, key=lambda layout: (not layout.fits, layout.seconds))


def _bound(config: RunConfig, on: Machine, programs: Programs) -> Layout:
    """A layout at the rates that programs reach, with everything hidden behind the slowest."""
    _, traced = programs.of(config, on.target).get()
    rates = on.achieved_rates(config.model.precision, config.replicas)
    return Layout(config, sum(times(part, rates).seconds for part in traced.plan().parts), True)


def _simulated(layout: Layout, on: Machine, programs: Programs) -> Layout:
    if on.platform == "cpu" or not is_automatic(layout.config):
        return layout
    first = trial(programs.of(layout.config, on.target), layout.config, on)
    return Layout(layout.config, first.seconds, first.fits)
