"""Presets by their name, with changes."""

from __future__ import annotations

from typing import Any

from config.families import config_class_of
from config.presets import merge, preset_data
from config.sections import RunConfig


def preset(name: str, file: str = "finetuning", **changes: Any) -> RunConfig:
    data = preset_data(file, name)
    return config_class_of(data, name).from_dict(merge(data, changes))
