"""Which state and activations of training stay in device memory: chosen by a simulated run."""

from __future__ import annotations

import popdist
import popxl
from config.machines import Machine, machine, machine_of_kind
from config.sections import RunConfig
from modelling.devices import device_desc
from popxl import hardware
from terminal.screen import say


def is_automatic(config: RunConfig) -> bool:
    """Whether the plan decides where entries live."""
    execution = config.execution
    return execution.placement == "auto" and not execution.resident_layers


def place_on(
    traced: popxl.plan.Traced, config: RunConfig, on: Machine, memory: float | None = None
) -> popxl.plan.Placement:
    """Place the entries of a program on a machine.

    Args:
        memory: bytes of a device; default: the machine's.
    """
    rates = on.rates(config.model.precision, config.replicas)
    return popxl.plan.place(traced, rates, int(memory or on.memory))


def place_here(ir: popxl.Ir, config: RunConfig) -> popxl.plan.Placement | None:
    """Place the entries of a training program on the devices that are here, and say what was
    chosen; None where the configuration decides, or devices share the host's memory.

    Raises:
        DeviceError: fewer devices than replicas.
    """
    desc, instances = device_desc(config), popdist.getNumInstances()
    memory = popxl.plan.device_memory(desc, config.replicas, instances)
    if memory is None or not is_automatic(config):
        return None
    kind = hardware.device_kinds(desc, config.replicas, instances)[0]
    known = machine_of_kind(kind)
    traced = popxl.plan.trace(ir, "gpu" if known is None else known.platform)
    placement = place_on(traced, config, known or machine("h100"), memory)
    say(described(placement) + ("" if known else f" ({kind} is unknown: as for an H100)"))
    return placement


def described(placement: popxl.plan.Placement) -> str:
    """A line: what stays on the device, and what that is expected to save."""
    kept = ", ".join(
        f"{kind.nbytes / 1e9:.1f} GB of {kind.label}"
        for kind in sorted(placement.kinds, key=lambda kind: -kind.nbytes)
        if kind.nbytes >= 5e7
    )
    before, after = placement.before.seconds, placement.after.seconds
    return (
        f"placement: {kept or 'nothing'} in device memory; a simulated run takes {after:.2f} s "
        f"(everything in host memory: {before:.2f} s)"
    )
