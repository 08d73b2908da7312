"""Presets: named configurations in YAML files that can inherit from one another.

xl_pod16:
  base: xl_pod8            # of the same file; `finetuning/xl_pod8` names another file's
  execution:
    data_parallel: 2       # merged, field by field, over what the base says
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from copy import deepcopy
from functools import cache
from glob import glob
from pathlib import Path
from typing import Any, TypeVar

from config.base import ConfigSection
from config.errors import ConfigError, did_you_mean
from files.errors import FileError
from files.formatting import format_name, format_value
from files.yaml_files import LocatedDict, location_prefix, read_yaml

DIRECTORY = Path(__file__).parent
LONGEST_LINE_OF_BASES = 16

_PATH_FIELDS = ("train", "validation", "tokenizer")
_WARMUP = ("warmup_steps", "warmup_proportion")

ConfigT = TypeVar("ConfigT", bound=ConfigSection)


def is_user_file(preset: str | None) -> bool:
    """Returns whether `--config` names a YAML file, not a preset."""
    return preset is not None and preset.endswith((".yml", ".yaml"))


def load_config(
    config_class: type[ConfigT],
    preset_file: str | Path,
    preset: str,
    overrides: Mapping[str, Any] | None = None,
) -> ConfigT:
    """Returns a preset's configuration with overrides, nested plain data, merged over it.

    Args:
        config_class: the root section of the preset's model family.
        preset_file: `"finetuning"`, `"inference"`, or the path of a YAML file of presets.
        preset: a name in that file, or the path of a YAML file (`.yml`, `.yaml`) that holds one
            configuration, such as the `config.yml` of a run.

    Raises:
        ConfigError: if the preset is unknown, or it or an override is not a valid configuration.
    """
    return config_class.from_dict(merge_over(load_preset(preset_file, preset), overrides or {}))


def preset_names(file: str | Path) -> list[str]:
    """Returns the names of the presets in a file, in order."""
    return list(_read_presets(_preset_path(file)))


def load_preset(file: str | Path, preset: str, option_names: Collection[str] = ()) -> LocatedDict:
    """Returns a preset as plain data, merged with the presets from which it inherits.

    Arguments as for `load_config`; `option_names` as for `normalize_user_yaml`, for a user's file.
    """
    if is_user_file(preset):
        from config.user_yaml import normalize_user_yaml

        return normalize_user_yaml(deepcopy(_read_presets(Path(preset))), option_names)
    return _load_with_bases(_preset_path(file), preset, ())


def merge_over(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> LocatedDict:
    """Returns `base` with the values of `overrides` merged over it, key by key.

    Steps win over epochs, as in transformers: those of the base, and those given with them. A way
    of saying the warm-up replaces the base's other one.
    """
    places = [data.locations if isinstance(data, LocatedDict) else {} for data in (base, overrides)]
    if overrides.get("steps") is not None and (base.get("epochs") or overrides.get("epochs")):
        overrides = {**overrides, "epochs": None}
    for name, other in (_WARMUP, _WARMUP[::-1]):
        if (
            overrides.get(name) is not None
            and base.get(other) is not None
            and other not in overrides
        ):
            overrides = {**overrides, other: None}
    kept = {key: place for key, place in places[0].items() if key not in overrides}
    merged = LocatedDict(base, kept | places[1])
    for key, value in overrides.items():
        below = merged.get(key)
        if isinstance(value, Mapping) and isinstance(below, Mapping):
            value = merge_over(below, value)
        merged[key] = value
    return merged


def with_absolute_paths(overrides: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns preset overrides in which data file paths are absolute.

    A run stores them, and can be loaded from another folder.
    """
    data = overrides.get("data")
    if not isinstance(data, Mapping):
        return overrides
    places = {
        name: make_paths_absolute(data[name])
        for name in _PATH_FIELDS
        if isinstance(data.get(name), str)
    }
    return merge_over(overrides, {"data": places}) if places else overrides


def make_paths_absolute(paths_text: str) -> str:
    """Returns comma-separated files, folders or glob patterns as absolute paths."""
    if os.path.exists(paths_text):
        return os.path.abspath(paths_text)
    parts = [part.strip() for part in paths_text.split(",")]
    here = all(os.path.exists(part) or glob(part, recursive=True) for part in parts)
    return ",".join(map(os.path.abspath, parts)) if here else paths_text


def _load_with_bases(path: Path, preset: str, visited: tuple[tuple[Path, str], ...]) -> LocatedDict:
    if (path, preset) in visited:
        cycle = " -> ".join([*(format_name(name) for _, name in visited), format_name(preset)])
        raise ConfigError(f"the presets of {path.name} inherit in a circle: {cycle}")
    if len(visited) == LONGEST_LINE_OF_BASES:
        raise ConfigError(
            f"preset {format_value(visited[0][1])} of {path.name} has more than {len(visited)} "
            "bases, one on top of the other"
        )
    presets = _read_presets(path)
    if preset not in presets:
        raise ConfigError(
            f"unknown preset {format_value(preset)} in {path.name}{did_you_mean(preset, presets)}"
        )
    data, place = deepcopy(presets[preset]), location_prefix(presets, preset)
    if not isinstance(data, LocatedDict):
        raise ConfigError(
            f"{place}preset {format_value(preset)} of {path.name} is {format_value(data)}, but "
            "must be a mapping"
        )
    if "base" not in data:
        return data
    base = data.pop("base")
    if not isinstance(base, str):
        raise ConfigError(
            f"{location_prefix(data, 'base')}base is {format_value(base)}, but must be text"
        )
    file, _, name = base.rpartition("/")
    base_path = path.parent / f"{file}.yml" if file else path
    return merge_over(_load_with_bases(base_path, name, (*visited, (path, preset))), data)


def _read_presets(path: Path) -> LocatedDict:
    """Returns the presets of a file; those of this program are read once, and not to be changed."""
    try:
        return _read_shipped_presets(path) if path.parent == DIRECTORY else read_yaml(path)
    except FileError as error:
        raise ConfigError(str(error)) from None


_read_shipped_presets = cache(read_yaml)
"""A start asks for a preset several times, and the file has a thousand lines."""


def _preset_path(file: str | Path) -> Path:
    path = Path(file)
    return path if path.suffix else DIRECTORY / f"{file}.yml"
