"""Throughput metrics: samples and tokens per second, model FLOP/s utilization, peak memory."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import popdist
from config.sections import RunConfig
from modelling.devices import resolve_device_desc
from planning.hardware.machines import machine_for_device_kind
from popxl import hardware


class Throughput:
    """Samples and steps per second of training, over the last `window` updates.

    The first update starts the clock, so that compilation is not measured.
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
        """Record that `steps_done` optimizer steps are done at the current time."""
        self._marks.append((self._clock(), steps_done))

    @property
    def samples_per_second(self) -> float | None:
        """Training samples per second; None before the second update."""
        rate = self.steps_per_second
        return None if rate is None else rate * self._samples_per_step

    def eta_seconds(self, steps: int) -> float | None:
        """Return the estimated seconds for `steps` more optimizer steps; None if unknown."""
        rate = self.steps_per_second
        return None if rate is None else steps / rate

    @property
    def steps_per_second(self) -> float | None:
        """Optimizer steps per second; None before the second update."""
        if len(self._marks) < 2:
            return None
        (start, before), (end, after) = self._marks[0], self._marks[-1]
        if end <= start or after <= before:
            return None
        return (after - before) / (end - start)


@dataclass(frozen=True)
class MfuInputs:
    """Peak FLOP/s and FLOPs of a step, for model FLOP/s utilization (MFU).

    Attributes:
        flops_per_step: FLOPs of an optimizer step without recomputation; None: unknown.
        peak_flops: peak FLOP/s of all devices; None: unknown.
        device_bytes: returns the peak memory of a device in bytes, or None.
    """

    flops_per_step: float | None = None
    peak_flops: float | None = None
    device_bytes: Callable[[], int | None] = lambda: None


def mfu_inputs(config: RunConfig) -> MfuInputs:
    """Return the devices' peak FLOP/s, if the hardware table lists them, and a step's FLOPs."""
    desc, replicas = resolve_device_desc(config), config.num_replicas
    instances = popdist.getNumInstances()

    def peak_flops() -> int | None:
        return hardware.peak_device_bytes(desc, replicas, instances)

    machine = machine_for_device_kind(hardware.device_kinds(desc, replicas, instances)[0])
    rate = machine.flops.get(config.model.precision) if machine else None
    if rate is None:
        return MfuInputs(device_bytes=peak_flops)
    from planning.requirements import finetuning_requirements

    execution = replace(config.execution, activations="keep", attention_serialisation=1)
    requirements = finetuning_requirements(replace(config, execution=execution))
    flops = requirements.flops_per_sample * config.training.global_batch_size
    return MfuInputs(flops, rate * replicas, peak_flops)


def throughput_metrics(
    throughput: Throughput, tokens: float | None, inputs: MfuInputs
) -> dict[str, float]:
    """Return the metrics of an optimizer step on throughput and memory.

    Args:
        tokens: number of the step's tokens without padding; None: not counted.
    """
    metrics = {"time": round(time.time(), 3)}
    samples, steps = throughput.samples_per_second, throughput.steps_per_second
    if samples is not None and steps is not None:
        metrics["samples_per_second"] = samples
        metrics["seconds_per_step"] = 1 / steps
        if tokens is not None:
            metrics["tokens_per_second"] = tokens * steps
        if inputs.flops_per_step and inputs.peak_flops:
            metrics["mfu"] = inputs.flops_per_step * steps / inputs.peak_flops
    host, device = peak_host_bytes(), inputs.device_bytes()
    if host is not None:
        metrics["peak_host_bytes"] = host
    if device is not None:
        metrics["peak_device_bytes"] = device
    return metrics


def peak_host_bytes() -> int | None:
    """Return the peak host memory of this process in bytes; None on Windows."""
    try:
        import resource
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
