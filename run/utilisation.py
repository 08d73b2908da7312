"""What a run knows of its devices and its work, for its records."""

from __future__ import annotations

from dataclasses import replace

import popdist
from config.machines import machine_of_kind
from config.sections import RunConfig
from machine.devices import device_desc
from planning.needs import finetuning_needs
from popxl import hardware
from run.records.pace import Utilisation


def utilisation_of(config: RunConfig) -> Utilisation:
    """The devices' peak and the work of a step, where the hardware table knows the devices.

    The operations of a step are those of the plan with nothing computed twice.
    """
    desc, replicas = device_desc(config), config.replicas
    instances = popdist.getNumInstances()

    def peak() -> int | None:
        return hardware.peak_device_bytes(desc, replicas, instances)

    rate = _peak_flops(hardware.device_kinds(desc, replicas, instances)[0], config.model.precision)
    if rate is None:
        return Utilisation(device_bytes=peak)
    execution = replace(config.execution, activations="keep", attention_serialisation=1)
    needs = finetuning_needs(replace(config, execution=execution))
    flops = needs.flops_per_sample * config.training.global_batch_size
    return Utilisation(flops, rate * replicas, peak)


def _peak_flops(kind: str, precision: str) -> float | None:
    """Operations per second of a device at its peak, by the name that it has itself."""
    machine = machine_of_kind(kind)
    return machine.flops.get(precision) if machine else None
