"""Log of executed steps on standard error (POPXL_STEPS=1).

The last line shows what a hung run waits for.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from popxl._schedule.schedule_walk import Steps


def log_steps(steps: Steps) -> Steps:
    """Prints each schedule step before it runs, with known scalars and seconds since the start."""
    start = time.perf_counter()

    def write_line(text: str) -> None:
        print(f"popxl: {time.perf_counter() - start:.3f} s: {text}", file=sys.stderr, flush=True)

    for step, frame in steps:
        part = f"  # {frame.region_label(step)}" if frame.region_label(step) else ""
        write_line(f"{frame.routine.title}: {frame.format_step(step)}{part} ({step.location})")
        yield step, frame
    write_line("all steps are dispatched: the host waits for the devices")
