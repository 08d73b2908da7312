"""Random seeds: pairs of uint32, the two halves of a 64-bit number."""

from __future__ import annotations

import numpy as np

MAX_UINT64 = 2**64 - 1
_MASK32 = 2**32 - 1


def create_seeds(
    seed: int,
    offset: int = 0,
    batches_per_step: int = 1,
    gradient_accumulation_factor: int = 1,
    replicas: int = 1,
) -> np.ndarray:
    """Creates random seeds (uint32 pairs), one for each use in a run of a session.

    They are the numbers of `numpy.random.default_rng(seed + offset)`: runs with equal sums of the
    two draw the same ones. `counter_seeds` tells all parents and runs apart.

    Args:
        seed: parent seed, 0 <= seed < 2**64. Equal parents give equal results.
        offset: another number for each run, to continue a stopped job.
        batches_per_step: number of batches in a run.
        gradient_accumulation_factor: number of micro-batches in a batch.
        replicas: number of replicas.

    Returns:
        uint32 array of shape (batches_per_step, gradient_accumulation_factor, replicas, 2) with
        dimensions equal to 1, except the last, removed.
    """
    shape = (batches_per_step, gradient_accumulation_factor, replicas)
    generator = np.random.default_rng(_check_seed(seed) + offset)
    raw = generator.integers(0, MAX_UINT64, shape, np.uint64, endpoint=True)
    return _split_uint64(raw).squeeze()


def counter_seeds(seed: int, offset: int = 0, count: int = 1) -> np.ndarray:
    """Returns `count` random seeds of run number `offset`, distinct over runs and parent seeds.

    They come from a counter-based generator (Philox, Salmon et al., 2011), so that skipping runs
    costs nothing.

    Args:
        seed: parent seed, 0 <= seed < 2**64.

    Returns:
        uint32 (count, 2).
    """
    skipped, rest = divmod(offset * count, 4)  # a count of Philox gives four draws
    generator = np.random.Philox(key=_check_seed(seed)).advance(skipped)
    return _split_uint64(generator.random_raw(rest + count)[rest:])


def _check_seed(seed: int) -> int:
    if not 0 <= seed <= MAX_UINT64:
        raise ValueError(f"seed must be in [0, 2**64), but is {seed}")
    return seed


def _split_uint64(numbers: np.ndarray) -> np.ndarray:
    """Splits 64-bit numbers into (high, low) 32-bit halves along a new last axis."""
    return np.stack([numbers >> np.uint64(32), numbers & np.uint64(_MASK32)], axis=-1).astype(
        np.uint32
    )


def uint64_to_two_uint32(num: int) -> tuple[int, int]:
    """Splits a 64-bit number into (high, low) 32-bit halves; raises ValueError out of range."""
    if not 0 <= num <= MAX_UINT64:
        raise ValueError(f"the number must be in [0, 2**64), but is {num}")
    return num >> 32, num & _MASK32


def two_uint32_to_uint64(a: int, b: int) -> int:
    """Joins (high, low) 32-bit halves; raises ValueError if one is out of range."""
    for value in (a, b):
        if not 0 <= value <= _MASK32:
            raise ValueError(f"the number must be in [0, 2**32), but is {value}")
    return (a << 32) | b
