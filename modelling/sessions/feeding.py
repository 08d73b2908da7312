"""Which data of a configured run are for the replicas of this process."""

from __future__ import annotations

import popdist
from config.sections import RunConfig
from data.batches import Loader, Samples
from data.dealing import Deal


def deal_of(config: RunConfig, micro_batches: int | None = None) -> Deal:
    """How a global batch is dealt.

    Args:
        micro_batches: of each data-parallel copy; default: those of an optimizer step.
    """
    each = config.replicas // popdist.getNumInstances()
    first = popdist.getInstanceIndex() * each
    e, steps = config.execution, micro_batches or config.gradient_accumulation
    return Deal(e.data_parallel, e.tensor_parallel, steps, slice(first, first + each))


def loader_of(config: RunConfig, samples: Samples) -> Loader:
    """Training batches for this process."""
    size = config.training.global_batch_size
    return Loader(samples, size, config.model.seed, deal_of(config).positions(size))
