"""Lazy variable values, computed by threads shortly before they are used."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Set
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from popxl.tensor import Variable

THREADS = 4


def compute_values_ahead(
    variables: Iterable[Variable],
    concurrent: Set[Variable],
    compute_value: Callable[[Variable], np.ndarray],
) -> Iterator[tuple[Variable, Callable[[], np.ndarray]]]:
    """Computes variables' values ahead in threads; yields each variable and its value function.

    Threads compute values ahead of their use, within the memory of the largest of them.

    Args:
        concurrent: variables whose values threads can compute.
        compute_value: makes a value.
    """
    variables = list(variables)
    lazy_variables = [var for var in variables if var in concurrent]
    free_bytes = max(map(_variable_bytes, lazy_variables), default=0)
    not_started = deque(lazy_variables)
    started: deque[tuple[Variable, Future[np.ndarray]]] = deque()
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        try:
            for var in variables:
                while not_started and (
                    not started or free_bytes >= _variable_bytes(not_started[0])
                ):
                    free_bytes -= _variable_bytes(not_started[0])
                    var_to_start = not_started.popleft()
                    started.append((var_to_start, pool.submit(compute_value, var_to_start)))
                if started and started[0][0] is var:
                    yield var, partial(_take_result, [started.popleft()[1]])
                    free_bytes += _variable_bytes(var)
                else:
                    yield var, partial(compute_value, var)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _take_result(futures: list[Future[np.ndarray]]) -> np.ndarray:
    """Returns a thread's computed value of a variable, and drops the thread's reference to it."""
    return futures.pop().result()


def _variable_bytes(var: Variable) -> int:
    return math.prod(var.shape_on_host) * var.dtype.itemsize
