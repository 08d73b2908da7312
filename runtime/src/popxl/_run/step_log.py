"""The steps of a run on standard error, with POPXL_STEPS=1: each before it is done, so the
last line is what a run that hangs waits for."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from popxl._schedule.schedule import step_text

if TYPE_CHECKING:
    from popxl._schedule.walk import Steps


def logged(steps: Steps) -> Steps:
    """Write each step, with the numbers that the host knows, and the seconds since the first."""
    start = time.perf_counter()

    def write(text: str) -> None:
        print(f"popxl: {time.perf_counter() - start:.3f} s: {text}", file=sys.stderr, flush=True)

    for step, at in steps:
        known = {slot: x for slot, x in enumerate(at.slots) if isinstance(x, (int, tuple))}
        part = at.part_of(step)
        write(f"{at.routine.title}: {step_text(step, known)}{f'  # {part}' if part else ''}")
        yield step, at
    write("all steps are dispatched: the host waits for the devices")
