"""Presets by their name, with changes."""

from __future__ import annotations

from typing import Any

from config.families import config_class_of_preset
from config.presets import load_preset, merge_over
from config.sections import RunConfig


def preset(name: str, file: str = "finetuning", **changes: Any) -> RunConfig:
    data = load_preset(file, name)
    return config_class_of_preset(data, name).from_dict(merge_over(data, changes))
