"""The model families and their configurations: one line each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from config.errors import ConfigError, nearest
from config.gptj import GPTJConfig
from config.sections import RunConfig
from config.t5 import T5Config
from files.shown import shown
from files.yaml_files import place_of

FAMILIES: dict[str, type[RunConfig]] = {
    "t5": T5Config,
    "gptj": GPTJConfig,
}


def config_class_of(data: Mapping[str, Any], preset: str) -> type[RunConfig]:
    """The configuration class of the family that a preset's data names.

    Raises:
        ConfigError: if it names none, or one that does not exist.
    """
    family = data.get("family")
    if not isinstance(family, str) or family not in FAMILIES:
        raise ConfigError(
            f"{place_of(data, 'family')}preset {shown(preset)} has the model family "
            f"{shown(family)}{nearest(shown(family), FAMILIES)}"
        )
    return FAMILIES[family]
