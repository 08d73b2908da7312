"""A person's YAML file: sections as in `config.yml`, and at its top the names that flags have.

model: google/flan-t5-small     # as --model
learning_rate: 1e-4             # as --learning_rate
data: {train: rows.jsonl, validation: 0.1}
"""

from __future__ import annotations

from typing import Any

from config.errors import ConfigError
from config.flags import ALIASES
from files.shown import shown, shown_name
from files.yaml_files import Located, place_of

NAMED = "--model"
"""Where `unfolded` puts a model's name, which may stand beside a section of that name."""


def is_own(preset: str | None) -> bool:
    """Whether `--config` names a file, not a preset."""
    return preset is not None and preset.endswith((".yml", ".yaml"))


def unfolded(data: Located) -> Located:
    """The file's values in the sections that they belong to, and a model's name under `NAMED`.

    Raises:
        ConfigError: a field is given twice, or in what is no section.
    """
    flags = {key: ALIASES.get(key, key) for key in data if key in ALIASES or "." in key}
    if isinstance(data.get("model"), str):
        flags["model"] = NAMED
    plain = {key: value for key, value in data.items() if key not in flags}
    whole = Located(plain, {key: data.places[key] for key in plain})
    for key, dotted in flags.items():
        _put(whole, dotted, data, key)
    return whole


def _put(whole: Located, dotted: str, data: Located, key: str) -> None:
    *sections, name = dotted.split(".")
    here: Any = whole
    for section in sections:
        if section not in here:
            here[section], here.places[section] = Located(), data.places[key]
        here = here[section]
        if not isinstance(here, Located):
            raise ConfigError(
                f"{place_of(data, key)}{section} is {shown(here)}, but {key} is in it"
            )
    if name in here:
        raise ConfigError(f"{place_of(data, key)}{shown_name(dotted)} stands twice")
    here[name], here.places[name] = data[key], data.places[key]
