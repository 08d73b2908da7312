"""Registry of model families, such as T5 and Llama."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, NamedTuple, get_args

from config.errors import ConfigError, did_you_mean
from config.presets import load_config, load_preset
from config.sections import RunConfig
from files.formatting import format_name, format_value
from files.yaml_files import location_prefix


class Family(NamedTuple):
    """Modules of a model family: of its configuration class, and of its implementation.

    They are named, not imported: a run imports those of its own family.

    Attributes:
        section, class_name: module and name of the configuration class.
        record: the module that implements the family.
        types: Hugging Face's model types that are of the family, or the name of their `Literal` in
            `section`; none: the family's name alone.
    """

    section: str
    class_name: str
    record: str
    types: tuple[str, ...] | str = ()

    @property
    def config(self) -> type[RunConfig]:
        """The configuration class of the family."""
        config_class: type[RunConfig] = getattr(import_module(self.section), self.class_name)
        return config_class

    @property
    def model_types(self) -> tuple[str, ...]:
        """Hugging Face's model types that are of the family; none: its name alone."""
        if isinstance(self.types, tuple):
            return self.types
        return get_args(getattr(import_module(self.section), self.types))


FAMILIES: dict[str, Family] = {
    "t5": Family("config.t5", "T5Config", "modelling.t5.model", ("t5", "mt5", "umt5")),
    "bart": Family("config.bart", "BartConfig", "modelling.bart.model", "ModelType"),
    "t5gemma": Family("config.t5gemma", "T5GemmaConfig", "modelling.t5gemma.model", "T5GemmaType"),
    "gptj": Family("config.gptj", "GPTJConfig", "modelling.gptj.model"),
    "llama": Family("config.llama", "LlamaConfig", "modelling.llama.model", "ModelType"),
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


def load_finetuning_config(preset: str, overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """Returns a fine-tuning preset's configuration, of its own family, as `load_config` does."""
    config_class = config_class_of_preset(load_preset("finetuning", preset), preset)
    return load_config(config_class, "finetuning", preset, overrides)
