"""The steps of a run on standard error, with POPXL_STEPS=1: each before it is done, so the
last line is what a run that hangs waits for."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from popxl._schedule.schedule_walk import Steps


def log_steps(steps: Steps) -> Steps:
    """Write each step, with the numbers that the host knows, and the seconds since the first."""
    start = time.perf_counter()

    def write(text: str) -> None:
        print(f"popxl: {time.perf_counter() - start:.3f} s: {text}", file=sys.stderr, flush=True)

    for step, frame in steps:
        part = f"  # {frame.part_of(step)}" if frame.part_of(step) else ""
        write(f"{frame.routine.title}: {frame.format_step(step)}{part} ({step.location})")
        yield step, frame
    write("all steps are dispatched: the host waits for the devices")
