"""Seeds for stochastic ops: pairs of uint32, the two halves of a 64-bit number."""

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
    """Create distinct seeds, one for each use in a run of a session.

    Args:
        seed: parent seed, 0 <= seed < 2**64. Equal parents give equal results.
        offset: skips the first `offset` runs' worth of seeds, to continue a stopped job.
        batches_per_step: number of batches in a run.
        gradient_accumulation_factor: number of micro-batches in a batch.
        replicas: number of replicas.

    Returns:
        uint32 array of shape (batches_per_step, gradient_accumulation_factor, replicas, 2) with
        dimensions equal to 1, except the last, removed.
    """
    if not 0 <= seed <= MAX_UINT64:
        raise ValueError(f"seed must be in [0, 2**64), but is {seed}")
    shape = (batches_per_step, gradient_accumulation_factor, replicas)
    count = int(np.prod(shape))
    # Philox is counter based, four draws to a count: skipping costs nothing, however far.
    skipped, rest = divmod(offset * count, 4)
    raw = np.random.Philox(key=seed).advance(skipped).random_raw(rest + count)[rest:]
    pairs = np.stack([raw >> np.uint64(32), raw & np.uint64(_MASK32)], axis=-1).astype(np.uint32)
    kept = tuple(n for n in shape if n != 1)
    return pairs.reshape((*kept, 2))


def uint64_to_two_uint32(num: int) -> tuple[int, int]:
    """Split a 64-bit number into (high, low) 32-bit halves. Raises ValueError out of range."""
    if not 0 <= num <= MAX_UINT64:
        raise ValueError(f"the number must be in [0, 2**64), but is {num}")
    return num >> 32, num & _MASK32


def two_uint32_to_uint64(a: int, b: int) -> int:
    """Join (high, low) 32-bit halves. Raises ValueError if one is out of range."""
    for value in (a, b):
        if not 0 <= value <= _MASK32:
            raise ValueError(f"the number must be in [0, 2**32), but is {value}")
    return (a << 32) | b
