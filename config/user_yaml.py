"""The user's YAML file: sections as in `config.yml`, and flag names at the top level.

model: google/flan-t5-small     # as --model
learning_rate: 1e-4             # as --learning_rate
data: {train: rows.jsonl, validation: 0.1}
wandb: true                     # as --wandb
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from config.errors import ConfigError
from config.flags import ALIASES, GROUPS
from config.unknown_flags import check_foreign_flags
from files.formatting import format_name, format_value
from files.yaml_files import LocatedDict, location_prefix

MODEL_KEY = "--model"
"""Key of the model's name in normalized data, where `model` is a section."""

OPTIONS_KEY = "--"
"""Key of the script's options in normalized data, by the names of their flags."""


def normalize_user_yaml(data: LocatedDict, option_names: Collection[str] = ()) -> LocatedDict:
    """Moves top-level flag names of a user's YAML file into their config sections.

    The model's name moves to `MODEL_KEY`, and script options to `OPTIONS_KEY`.

    Args:
        option_names: flags that are no fields, with underscores and without leading dashes.

    Raises:
        ConfigError: a field is given twice, in what is no section, or as another trainer names it.
    """
    _check_no_presets(data)
    spelled = {key: key.replace("-", "_") for key in data}
    flags = {key: ALIASES.get(name, name) for key, name in spelled.items()
             if name in ALIASES or "." in name}  # fmt: skip
    if isinstance(data.get("model"), str):
        flags["model"] = MODEL_KEY
    plain = {key: value for key, value in data.items() if key not in flags}
    file_values = LocatedDict(plain, {key: data.locations[key] for key in plain})
    for key, dotted in flags.items():
        _set_field(file_values, dotted, data, key)
    found = LocatedDict()
    for name in option_names:
        _move_option(file_values, name, found)
    if found:
        file_values[OPTIONS_KEY] = found
    for key, value in data.items():
        if key in file_values and not isinstance(value, LocatedDict):
            _check_not_foreign_flag(data, key)
    return file_values


def _check_no_presets(data: LocatedDict) -> None:
    """Raises ConfigError for a file of several presets."""
    for key, value in data.items():
        if key not in GROUPS and isinstance(value, LocatedDict) and value.keys() & GROUPS.keys():
            raise ConfigError(
                f"{location_prefix(data, key)}{format_name(key)} is a preset: copy what is in it "
                "into a file of its own, which begins with family: t5, gptj or llama"
            )


def _check_not_foreign_flag(data: LocatedDict, key: str) -> None:
    """Raises ConfigError with a translation if a key is another trainer's flag."""
    try:
        check_foreign_flags([f"--{key}={format_name(data[key], 60)}"])
    except ConfigError as error:
        raise ConfigError(f"{location_prefix(data, key)}{error}") from None


def _move_option(file_values: LocatedDict, name: str, option_values: LocatedDict) -> None:
    """Moves an option out of the file's values if it is there: `a.b` can be `b` of `a`."""
    *sections, last = name.split(".")
    inner: Any = file_values
    for section in sections:
        inner = inner.get(section) if isinstance(inner, LocatedDict) else None
    if not isinstance(inner, LocatedDict):
        return
    for key in [key for key in inner if key.replace("-", "_") == last]:
        if name in option_values:
            raise ConfigError(f"{location_prefix(inner, key)}{format_name(name)} stands twice")
        option_values[name], option_values.locations[name] = inner.pop(key), inner.locations[key]
        if sections and not inner:
            del file_values[sections[0]]


def _set_field(file_values: LocatedDict, field_path: str, data: LocatedDict, key: str) -> None:
    *sections, name = field_path.split(".")
    inner: Any = file_values
    for section in sections:
        if section not in inner:
            inner[section], inner.locations[section] = LocatedDict(), data.locations[key]
        inner = inner[section]
        if not isinstance(inner, LocatedDict):
            raise ConfigError(
                f"{location_prefix(data, key)}{section} is {format_value(inner)}, but {key} is in "
                "it"
            )
    if name in inner:
        raise ConfigError(f"{location_prefix(data, key)}{format_name(field_path)} stands twice")
    inner[name], inner.locations[name] = data[key], data.locations[key]
