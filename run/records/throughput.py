"""How fast a run goes, and how much memory it takes: fields of metrics.jsonl."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import popdist
from config.sections import RunConfig
from modelling.devices import device_desc
from planning.hardware.machines import machine_for_device_kind
from planning.requirements import finetuning_requirements
from popxl import hardware


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

    def eta_seconds(self, steps: int) -> float | None:
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


@dataclass(frozen=True)
class MfuInputs:
    """What utilisation is measured against: the machine's peak, and the work of a step.

    Attributes:
        flops_per_step: operations that the model needs for an optimizer step, nothing computed
            twice; None: not counted.
        peak_flops: operations per second of all devices at their peak; None: not known.
        device_bytes: gives the most memory that a device had in use so far, or None.
    """

    flops_per_step: float | None = None
    peak_flops: float | None = None
    device_bytes: Callable[[], int | None] = lambda: None


def mfu_inputs(config: RunConfig) -> MfuInputs:
    """The devices' peak and the work of a step, where the hardware table knows the devices.

    The operations of a step are those of the plan with nothing computed twice.
    """
    desc, replicas = device_desc(config), config.replicas
    instances = popdist.getNumInstances()

    def peak() -> int | None:
        return hardware.peak_device_bytes(desc, replicas, instances)

    machine = machine_for_device_kind(hardware.device_kinds(desc, replicas, instances)[0])
    rate = machine.flops.get(config.model.precision) if machine else None
    if rate is None:
        return MfuInputs(device_bytes=peak)
    execution = replace(config.execution, activations="keep", attention_serialisation=1)
    requirements = finetuning_requirements(replace(config, execution=execution))
    flops = requirements.flops_per_sample * config.training.global_batch_size
    return MfuInputs(flops, rate * replicas, peak)


def throughput_metrics(
    throughput: Throughput, tokens: float | None, use: MfuInputs
) -> dict[str, float]:
    """The fields of a step.

    Args:
        tokens: of the step's samples, without padding; None: not counted.
    """
    row = {"time": round(time.time(), 3)}
    samples, steps = throughput.samples_per_second, throughput.steps_per_second
    if samples is not None and steps is not None:
        row["samples_per_second"] = samples
        row["seconds_per_step"] = 1 / steps
        if tokens is not None:
            row["tokens_per_second"] = tokens * steps
        if use.flops_per_step and use.peak_flops:
            row["mfu"] = use.flops_per_step * steps / use.peak_flops
    host, device = peak_host_bytes(), use.device_bytes()
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
