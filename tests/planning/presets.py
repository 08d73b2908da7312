"""Presets by their name, with changes."""

from __future__ import annotations

from typing import Any

from config.families import config_class_of
from config.presets import load_config, preset_data
from config.sections import RunConfig


def preset(name: str, file: str = "finetuning", **changes: Any) -> RunConfig:
    config_class = config_class_of(preset_data(file, name), name)
    return load_config(config_class, file, name, changes)
