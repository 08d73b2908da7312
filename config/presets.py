"""Presets: named configurations in YAML files, which may build on one another.

xl_pod16:
  base: xl_pod8            # of the same file; `finetuning/xl_pod8` names another file's
  execution:
    data_parallel: 2       # merged, field by field, over what the base says
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

from config.base import Section
from config.errors import ConfigError, nearest

DIRECTORY = Path(__file__).parent

ConfigT = TypeVar("ConfigT", bound=Section)


def load_config(
    config_class: type[ConfigT],
    file: str | Path,
    preset: str,
    overrides: Mapping[str, Any] | None = None,
) -> ConfigT:
    """The preset's configuration with the overrides, nested plain data, merged over it.

    Args:
        config_class: the root section of the preset's model family.
        file: `"finetuning"`, `"inference"`, or the path of a YAML file of presets.
        preset: a name in that file, or the path of a YAML file (`.yml`, `.yaml`) that holds one
            configuration, such as the `config.yml` of a run.

    Raises:
        ConfigError: if the preset is unknown, or it or an override is not a valid configuration.
    """
    return config_class.from_dict(merge(preset_data(file, preset), overrides or {}))


def preset_names(file: str | Path) -> list[str]:
    """The names of the presets in a file, in its order."""
    return list(_read_yaml(_preset_file(file)))


def preset_data(file: str | Path, preset: str) -> dict[str, Any]:
    """A preset as plain data, with everything it inherits; arguments as for `load_config`."""
    if preset.endswith((".yml", ".yaml")):
        return _read_yaml(Path(preset))
    return _resolve(_preset_file(file), preset, ())


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `over` laid over it, mappings merged key by key."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(value, Mapping) and isinstance(below, Mapping):
            value = merge(below, value)
        merged[key] = value
    return merged


def _resolve(path: Path, preset: str, seen: tuple[tuple[Path, str], ...]) -> dict[str, Any]:
    if (path, preset) in seen:
        cycle = " -> ".join([*(name for _, name in seen), preset])
        raise ConfigError(f"the presets of {path.name} inherit in a circle: {cycle}")
    presets = _read_yaml(path)
    if preset not in presets:
        raise ConfigError(f"unknown preset {preset!r} in {path.name}{nearest(preset, presets)}")
    data = presets[preset]
    if not isinstance(data, dict):
        raise ConfigError(f"preset {preset!r} of {path.name} is {data!r}, but must be a mapping")
    own = {key: value for key, value in data.items() if key != "base"}
    if "base" not in data:
        return own
    file, _, base = str(data["base"]).rpartition("/")
    base_path = path.with_name(f"{file}.yml") if file else path
    return merge(_resolve(base_path, base, (*seen, (path, preset))), own)


def _preset_file(file: str | Path) -> Path:
    path = Path(file)
    return path if path.suffix else DIRECTORY / f"{file}.yml"


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), _StrictLoader)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not a text file") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        raise ConfigError(f"{path}, line {line}: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a mapping, not {type(data).__name__}")
    return data


class _StrictLoader(yaml.SafeLoader):
    """A safe loader that does not let the second of two equal keys win in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for index, key in enumerate(keys):
            if key in keys[:index]:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands twice", node.value[index][0].start_mark
                )
        return super().construct_mapping(node, deep)
