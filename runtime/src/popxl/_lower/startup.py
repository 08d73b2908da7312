"""What it took to make a session ready."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass

from popxl._lower.cache import statistics


@dataclass(frozen=True)
class Startup:
    """What creating a session did.

    Attributes:
        seconds: wall-clock time of the whole.
        from_cache: whether the executable was loaded from the cache (`POPXL_CACHE_DIR`).
        traces: how often JAX traced the program; 0 if it came from the cache.
        compiles: how often XLA compiled it; 0 if it came from the cache.
    """

    seconds: float
    from_cache: bool
    traces: int
    compiles: int


class Stopwatch:
    """Measures a `Startup`, from its creation on.

    It reads the counters of the process: sessions created at once in several threads are counted
    with each other.
    """

    def __init__(self) -> None:
        self._before = dataclasses.replace(statistics)
        self._start = time.perf_counter()

    def read(self) -> Startup:
        """What happened until now."""
        return Startup(
            seconds=time.perf_counter() - self._start,
            from_cache=statistics.hits > self._before.hits,
            traces=statistics.traces - self._before.traces,
            compiles=statistics.compiles - self._before.compiles,
        )
