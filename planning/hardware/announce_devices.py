"""Messages on the devices that a run uses, at its start."""

from __future__ import annotations

from collections import Counter

import popdist
from config.sections import RunConfig
from files.formatting import format_path
from modelling.devices import resolve_device_desc
from popxl import hardware
from terminal.screen import say


def announce_devices(config: RunConfig) -> None:
    """Print a run's devices at its start, and warn if the offload folder is in memory.

    Raises:
        DeviceError: fewer devices than data_parallel × tensor_parallel.
        DistributedError: the processes cannot share these equally.
    """
    say(f"running on {describe_devices(config)}")
    folder = config.execution.disk
    if folder is None:
        return
    from planning.hardware.file_systems import is_in_memory

    if is_in_memory(folder):
        say(
            f"warning: --execution.disk {format_path(folder)} is in memory (tmpfs), which the "
            "state then takes: name a folder of a disk"
        )


def describe_devices(config: RunConfig) -> str:
    """Return the count and names of the devices, such as "8 × NVIDIA H100 80GB HBM3".

    Raises:
        DeviceError: fewer devices than data_parallel × tensor_parallel.
    """
    instances = popdist.getNumInstances()
    names = Counter(
        hardware.device_kinds(resolve_device_desc(config), config.num_replicas, instances)
    )
    counted = ", ".join(f"{count} × {name}" for name, count in names.items())
    return counted + (f" in {instances} processes" if instances > 1 else "")
