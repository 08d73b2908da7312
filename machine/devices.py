"""Which device a configuration runs on, as `popxl.Session` calls it."""

from __future__ import annotations

from collections import Counter

import popdist
from config.sections import RunConfig
from files.formatting import format_path
from machine.file_systems import is_in_memory
from popxl import hardware
from popxl.session import DeviceDesc
from terminal.screen import say

_DESCRIPTIONS: dict[str, DeviceDesc] = {"auto": "ipu_hw", "cpu": "cpu", "gpu": "gpu", "tpu": "tpu"}


def device_desc(config: RunConfig) -> DeviceDesc:
    """`device_desc` of a session; "auto" is the best platform present."""
    return _DESCRIPTIONS[config.execution.device]


def platform(config: RunConfig) -> str:
    """The platform that a configuration runs on: "cpu", "gpu" or "tpu"."""
    device = config.execution.device
    return hardware.platform(_DESCRIPTIONS[device]) if device == "auto" else device


def announce_devices(config: RunConfig) -> None:
    """Say what the program runs on, before anything slow, and that a disk is none.

    Raises:
        DeviceError: fewer devices than data_parallel × tensor_parallel.
        DistributedError: the processes cannot share these equally.
    """
    say(f"running on {described_devices(config)}")
    folder = config.execution.disk
    if folder is not None and is_in_memory(folder):
        say(
            f"warning: --execution.disk {format_path(folder)} is in memory (tmpfs), which the "
            "state then takes: name a folder of a disk"
        )


def described_devices(config: RunConfig) -> str:
    """The devices of a configuration, such as "8 × NVIDIA H100 80GB HBM3".

    Raises:
        DeviceError: fewer devices than data_parallel × tensor_parallel.
    """
    instances = popdist.getNumInstances()
    kinds = Counter(hardware.device_kinds(device_desc(config), config.replicas, instances))
    names = ", ".join(f"{count} × {kind}" for kind, count in kinds.items())
    return names + (f" in {instances} processes" if instances > 1 else "")
