"""Registry of model families, such as T5 and Llama."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, get_args

from config.bart import BartConfig
from config.bart import ModelType as BartType
from config.errors import ConfigError, did_you_mean
from config.gptj import GPTJConfig
from config.llama import LlamaConfig, ModelType
from config.sections import RunConfig
from config.t5 import T5Config
from config.t5gemma import T5GemmaConfig, T5GemmaType
from files.formatting import format_name, format_value
from files.yaml_files import location_prefix


class Family(NamedTuple):
    """Configuration class of a model family, and the module that implements the family.

    The module is named, not imported: a run imports that of its own family.
    """

    config: type[RunConfig]
    record: str
    model_types: tuple[str, ...] = ()
    """Hugging Face's model types that are of the family; none: its name alone."""


FAMILIES: dict[str, Family] = {
    "t5": Family(T5Config, "modelling.t5.model", ("t5", "mt5", "umt5")),
    "bart": Family(BartConfig, "modelling.bart.model", get_args(BartType)),
    "t5gemma": Family(T5GemmaConfig, "modelling.t5gemma.model", get_args(T5GemmaType)),
    "gptj": Family(GPTJConfig, "modelling.gptj.model"),
    "llama": Family(LlamaConfig, "modelling.llama.model", get_args(ModelType)),
}


def family_by_model_type() -> dict[str, str]:
    """Returns the model family of each Hugging Face `model_type`."""
    return {
        kind: name for name, family in FAMILIES.items() for kind in family.model_types or (name,)
    }


def config_class_of_preset(data: Mapping[str, Any], preset: str) -> type[RunConfig]:
    """Returns the configuration class of the model family that a preset names.

    Raises:
        ConfigError: if it names none, or one that does not exist.
    """
    family = data.get("family")
    if not isinstance(family, str) or family not in FAMILIES:
        raise ConfigError(
            f"{location_prefix(data, 'family')}preset '{format_name(preset, 40)}' has the family "
            f"{format_value(family)}{did_you_mean(format_value(family), FAMILIES)}"
        )
    return FAMILIES[family].config
