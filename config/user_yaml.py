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


def is_user_file(preset: str | None) -> bool:
    """Returns whether `--config` names a YAML file, not a preset."""
    return preset is not None and preset.endswith((".yml", ".yaml"))


def normalize_user_yaml(data: LocatedDict, options: Collection[str] = ()) -> LocatedDict:
    """Moves top-level flag names of a user's YAML file into their config sections.

    The model's name moves to `MODEL_KEY`, and script options to `OPTIONS_KEY`.

    Args:
        options: flags that are no fields, with underscores and without leading dashes.

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
    whole = LocatedDict(plain, {key: data.locations[key] for key in plain})
    for key, dotted in flags.items():
        _put(whole, dotted, data, key)
    taken = LocatedDict()
    for name in options:
        _move(whole, name, taken)
    if taken:
        whole[OPTIONS_KEY] = taken
    for key, value in data.items():
        if key in whole and not isinstance(value, LocatedDict):
            _check_name(data, key)
    return whole


def _check_no_presets(data: LocatedDict) -> None:
    """Raises ConfigError for a file of several presets."""
    for key, value in data.items():
        if key not in GROUPS and isinstance(value, LocatedDict) and value.keys() & GROUPS.keys():
            raise ConfigError(
                f"{location_prefix(data, key)}{format_name(key)} is a preset: copy what is in it "
                "into a file of its own, which begins with family: t5, gptj or llama"
            )


def _check_name(data: LocatedDict, key: str) -> None:
    """Raises ConfigError with a translation if a key is another trainer's flag."""
    try:
        check_foreign_flags([f"--{key}={format_name(data[key], 60)}"])
    except ConfigError as error:
        raise ConfigError(f"{location_prefix(data, key)}{error}") from None


def _move(whole: LocatedDict, name: str, taken: LocatedDict) -> None:
    """Moves an option out of the file's values if it is there: `a.b` can be `b` of `a`."""
    *sections, last = name.split(".")
    here: Any = whole
    for section in sections:
        here = here.get(section) if isinstance(here, LocatedDict) else None
    if not isinstance(here, LocatedDict):
        return
    for key in [key for key in here if key.replace("-", "_") == last]:
        if name in taken:
            raise ConfigError(f"{location_prefix(here, key)}{format_name(name)} stands twice")
        taken[name], taken.locations[name] = here.pop(key), here.locations[key]
        if sections and not here:
            del whole[sections[0]]


def _put(whole: LocatedDict, dotted: str, data: LocatedDict, key: str) -> None:
    *sections, name = dotted.split(".")
    here: Any = whole
    for section in sections:
        if section not in here:
            here[section], here.locations[section] = LocatedDict(), data.locations[key]
        here = here[section]
        if not isinstance(here, LocatedDict):
            raise ConfigError(
                f"{location_prefix(data, key)}{section} is {format_value(here)}, but {key} is in it"
            )
    if name in here:
        raise ConfigError(f"{location_prefix(data, key)}{format_name(dotted)} stands twice")
    here[name], here.locations[name] = data[key], data.locations[key]
