"""Device description and platform (CPU, GPU, TPU) that a configuration runs on."""

from __future__ import annotations

from config.sections import RunConfig
from popxl import hardware
from popxl.session import DeviceDesc

_DESCRIPTIONS: dict[str, DeviceDesc] = {"auto": "ipu_hw", "cpu": "cpu", "gpu": "gpu", "tpu": "tpu"}


def resolve_device_desc(config: RunConfig) -> DeviceDesc:
    """Return the `device_desc` argument of `popxl.Session`; "auto" is the best platform present."""
    return _DESCRIPTIONS[config.execution.device]


def resolve_platform(config: RunConfig) -> str:
    """Return the platform that a configuration runs on: "cpu", "gpu" or "tpu"."""
    device = config.execution.device
    return hardware.platform(_DESCRIPTIONS[device]) if device == "auto" else device
