"""How fast training goes, over the last steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable


class Throughput:
    """Measures steps per second over the last `window` updates.

    The time before the first update holds compilation, so it is left out.
    """

    def __init__(
        self,
        samples_per_step: int,
        window: int = 50,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._samples_per_step = samples_per_step
        self._clock = clock
        self._marks: deque[tuple[float, int]] = deque(maxlen=window + 1)

    def update(self, steps_done: int) -> None:
        """Note that so many steps are done now."""
        self._marks.append((self._clock(), steps_done))

    @property
    def samples_per_second(self) -> float | None:
        """Samples per second; None while fewer than two updates show it."""
        rate = self.steps_per_second
        return None if rate is None else rate * self._samples_per_step

    def seconds_for(self, steps: int) -> float | None:
        """Seconds that so many more steps will take; None while unknown."""
        rate = self.steps_per_second
        return None if rate is None else steps / rate

    @property
    def steps_per_second(self) -> float | None:
        """Steps per second; None while fewer than two updates show it."""
        if len(self._marks) < 2:
            return None
        (start, before), (end, after) = self._marks[0], self._marks[-1]
        if end <= start or after <= before:
            return None
        return (after - before) / (end - start)
