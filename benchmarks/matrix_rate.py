"""What the machine can do at best: the rate of one large matrix product."""

from __future__ import annotations

import time

import numpy as np
import torch


def matrix_rate(size: int = 2048, runs: int = 10) -> float:
    """Operations per second of a float32 product of square matrices on CPU: the best of `runs`.

    By torch, with all its threads.
    """
    a, b = (torch.from_numpy(np.ones((size, size), np.float32)) for _ in range(2))
    seconds = []
    for _ in range(runs + 1):
        start = time.perf_counter()
        torch.mm(a, b)
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)
