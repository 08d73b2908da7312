"""A global batch laid out for the replicas of a program."""

from __future__ import annotations

import numpy as np


def per_replica(
    samples: np.ndarray,
    data_parallel: int,
    tensor_parallel: int,
    gradient_accumulation: int,
    own: slice = slice(None),
) -> np.ndarray:
    """Cut a global batch into micro-batches, and give each replica its own.

    Replica r belongs to data-parallel copy r // tensor_parallel; the replicas of a copy get the
    same samples. Micro-batch a of copy d has the samples from
    (a * data_parallel + d) * micro_batch_size on: the batch is read in order, so every split of it
    computes the same samples.

    Args:
        samples: [global_batch, ...].
        own: which replicas the host streams of this process feed; default: all.

    Returns:
        [gradient_accumulation, own replicas, micro_batch, ...], as host streams take it.

    Raises:
        ValueError: the batch cannot be cut evenly.
    """
    parts = gradient_accumulation * data_parallel
    if len(samples) % parts:
        raise ValueError(
            f"a global batch of {len(samples)} samples cannot be cut into {gradient_accumulation} "
            f"micro-batches for each of {data_parallel} data-parallel copies"
        )
    micro = (gradient_accumulation, data_parallel, len(samples) // parts)
    copies = np.repeat(np.arange(data_parallel), tensor_parallel)[own]
    return samples.reshape(*micro, *samples.shape[1:])[:, copies]
