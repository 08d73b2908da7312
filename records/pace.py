"""How fast a run goes, and how much memory it takes: fields of metrics.jsonl."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from records.throughput import Throughput


@dataclass(frozen=True)
class Machine:
    """What is known of the machine and of the work.

    Attributes:
        flops_per_step: operations that the model needs for an optimizer step, nothing computed
            twice; None: not counted.
        peak_flops: operations per second of all devices at their peak; None: not known.
        device_bytes: gives the most memory that a device had in use so far, or None.
    """

    flops_per_step: float | None = None
    peak_flops: float | None = None
    device_bytes: Callable[[], int | None] = lambda: None


def pace(throughput: Throughput, tokens: float | None, machine: Machine) -> dict[str, float]:
    """The fields of a step.

    Args:
        tokens: of the step's samples, without padding; None: not counted.
    """
    row = {"time": round(time.time(), 3)}
    samples, steps = throughput.samples_per_second, throughput.steps_per_second
    if samples is not None and steps is not None:
        row["samples_per_second"] = samples
        if tokens is not None:
            row["tokens_per_second"] = tokens * steps
        if machine.flops_per_step and machine.peak_flops:
            row["mfu"] = machine.flops_per_step * steps / machine.peak_flops
    host, device = peak_host_bytes(), machine.device_bytes()
    if host is not None:
        row["peak_host_bytes"] = host
    if device is not None:
        row["peak_device_bytes"] = device
    return row


def peak_host_bytes() -> int | None:
    """Most memory that this process had so far; None on Windows, which does not tell."""
    try:
        import resource
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
