"""Which device a configuration runs on, as `popxl.Session` calls it."""

from __future__ import annotations

from config.sections import RunConfig

_DESCRIPTIONS = {"auto": "ipu_hw", "cpu": "cpu", "gpu": "gpu", "tpu": "tpu"}


def device_desc(config: RunConfig) -> str:
    """`device_desc` of a session; "auto" is the best platform present."""
    return _DESCRIPTIONS[config.execution.device]
