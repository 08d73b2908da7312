"""Which device a configuration runs on, as `popxl.Session` calls it."""

from __future__ import annotations

from config.sections import RunConfig
from popxl.session import DeviceDesc

_DESCRIPTIONS: dict[str, DeviceDesc] = {"auto": "ipu_hw", "cpu": "cpu", "gpu": "gpu", "tpu": "tpu"}


def device_desc(config: RunConfig) -> DeviceDesc:
    """`device_desc` of a session; "auto" is the best platform present."""
    return _DESCRIPTIONS[config.execution.device]
