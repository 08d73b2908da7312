"""Base configuration, which flags override: a preset, a YAML file, a model or a run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from config.base import (
    ConfigSection,
    config_fields,
    field_annotations,
    flatten_by_path,
    is_section_type,
)
from config.config_sources import ConfigSource, LayeredConfig, sets_every_field
from config.errors import ConfigError
from config.families import config_class_of_preset
from config.presets import load_preset, merge_over
from config.run import Checkpoint
from config.sections import RunConfig
from config.values import ValueType
from files.formatting import format_name, format_path
from terminal.preparse import PreParsedArgs

RANDOM = "random"
"""Value of `--load` for random initial weights."""

SMALL_MODEL = "google/flan-t5-small"
"""Model to use if only data are given."""

_EVAL_SOURCE = ConfigSource("this program", {"model": {"eval": True}})
_PER_RUN_FIELDS = ("checkpoint.load", "checkpoint.save", "checkpoint.mirror")
"""Fields that a resumed run does not take from the saved configuration."""
_PATH_FIELDS = (
    "checkpoint.mirror", "execution.quantized_cache", "training.reference_cache",
    "training.teacher", "training.teacher_cache", "data.train", "data.validation",
)  # fmt: skip
"""Fields of paths outside the run's folder."""


class ConfigLoader(Protocol):
    """Interface for loading configurations of runs, models and adapters from files."""

    def from_load(self, load: str) -> Mapping[str, Any] | None:
        """Returns the configuration that a new run inherits from the run in `--load`.

        None if `--load` names a model.
        """
        ...

    def from_run(self, load: str) -> Mapping[str, Any] | None:
        """Returns the configuration stored by the run in `--load`; None if that is no run."""
        ...

    def from_save(self, save: str, mirror: str | None, plans: bool) -> Mapping[str, Any] | None:
        """Returns the full configuration of the run to resume in `--save`; None if there is no run.

        Args:
            mirror: address to restore the run from if the folder is gone.
            plans: do not restore it.
        """
        ...

    def resolve_addresses(self, checkpoint: Checkpoint) -> Mapping[str, Any]:
        """Returns the local folders of checkpoints given by URL, by the field's dotted path."""
        ...

    def from_adapter(self, folder: str, config: RunConfig) -> Mapping[str, Any]:
        """Returns the nested configuration fields that a saved adapter in a folder determines."""
        ...

    def new_token_fields(self, settings: LayeredConfig) -> Mapping[str, Any]:
        """Returns the fields, by dotted path, for a tokenizer's tokens that the model lacks."""
        ...

    def from_model(self, name: str) -> Mapping[str, Any]:
        """Returns the configuration of a Hugging Face model in a folder or on the hub."""
        ...


@dataclass(frozen=True)
class BaseConfig:
    """Configuration that flags override, with the name of its origin.

    Attributes:
        name: name of the preset, file, model or folder.
        run: folder of the resumed run; None for a new run.
        run_overrides: values of `--config` given beside a resumed run.
        source_run: folder of the run whose settings are loaded, which can be someone else's.
        is_unspecified: True if nothing is named; `--help` then covers all families.
    """

    name: str
    settings: LayeredConfig
    run: str | None = None
    run_overrides: Mapping[str, Any] = field(default_factory=dict)
    source_run: str | None = None
    is_unspecified: bool = False

    def external_paths(self, flags: Mapping[str, Any]) -> list[str]:
        """Returns a message about a loaded run's paths that are outside its folder.

        Paths that a flag sets are left out: whoever made the folder chose the others.
        """
        if self.source_run is None:
            return []
        named, given = flatten_by_path(self.settings.sources[0].values), flatten_by_path(flags)
        inside = os.path.abspath(self.source_run)
        outside = [
            f"{name} {format_path(named[name])}"
            for name in _PATH_FIELDS
            if isinstance(named.get(name), str)
            and name not in given
            and not os.path.abspath(named[name]).startswith(f"{inside}{os.sep}")
        ]
        found = ", ".join(outside)
        return [f"as the run in {format_path(self.source_run)} says: {found}"] if found else []

    def differences(self, flags: Mapping[str, Any]) -> list[str]:
        """Returns messages about config fields that differ from those of the resumed run.

        Flags (nested) take effect; values of `--config` do not.
        """
        if self.run is None:
            return []
        before, by_flags = flatten_by_path(self.settings.sources[0].values), flatten_by_path(flags)
        asked = flatten_by_path(merge_over(self.run_overrides, flags))
        if asked.get("training.epochs") is not None:  # which decide
            asked.pop("training.steps", None)
        lines = []
        for leaf in config_fields(self.settings.section):
            name = leaf.path
            if name in _PER_RUN_FIELDS or name not in before or name not in asked:
                continue
            old, new = _stored_value(leaf.type, before[name]), _stored_value(leaf.type, asked[name])
            if old == new:
                continue
            if name in by_flags:
                lines.append(f"{name}: {format_name(old)} -> {format_name(new)}")
            else:
                lines.append(
                    f"{name}: {format_name(old)} of the run in {format_path(self.run)}, not "
                    f"{format_name(new)} of {format_path(self.name)}"
                )
        return lines


def _stored_value(value_type: ValueType, value: Any) -> Any:
    """Returns a value of a config field in the type that the field stores, such as a number."""
    try:
        return value_type.check(value, "")
    except ValueError:
        return value


def resolve_base_config(
    args: PreParsedArgs,
    presets: str | Path,
    default_preset: str,
    loader: ConfigLoader | None,
    takes_default: bool = False,
) -> BaseConfig:
    """Returns the configuration of a command line before its flags override fields.

    Arguments as for `read_command_line`.

    Raises:
        ConfigError: no model is named, or it cannot be loaded.
    """
    if loader is None:
        name = args.config or default_preset
        return _base_with_defaults(name, args.yaml_values or load_preset(presets, name))
    evaluates = presets == "inference"
    base = (None if evaluates else _base_from_resumed_run(args, loader)) or _base_of_new_run(
        args, loader
    )
    if base is not None:
        overrides = [_EVAL_SOURCE] if evaluates else []
        return replace(base, settings=base.settings.with_sources(*overrides))
    if takes_default:
        return _base_with_defaults(default_preset, load_preset(presets, default_preset))
    if not args.asks_help:
        raise ConfigError(
            "nothing says which model: give --model with a Hugging Face folder or name, --load "
            "with the folder of a run, or --config with a preset, such as tiny, xxl_pod64 (of "
            "Graphcore's FLAN-T5) or gptj_6B_1024_pod64 (of its GPT-J); see --help"
        )
    open_ = merge_over({"family": "t5"}, _EVAL_SOURCE.values if evaluates else {})
    section = config_class_of_preset(open_, default_preset)
    settings = LayeredConfig(section, (ConfigSource(default_preset, open_),))
    return BaseConfig(default_preset, settings, is_unspecified=True)


def _base_with_defaults(name: str, values: Mapping[str, Any]) -> BaseConfig:
    """Returns a base configuration in which missing config fields have default values."""
    return BaseConfig(
        name,
        LayeredConfig(config_class_of_preset(values, name), (ConfigSource(name, values, True),)),
    )


# ---- a run that is continued --------------------------------------------------------------------
def _base_from_resumed_run(args: PreParsedArgs, loader: ConfigLoader) -> BaseConfig | None:
    """Returns the configuration of the run to resume; None if no run is resumed.

    It is the run in `--save`, else that in `--load` with `--config` over it.
    """
    values, folder, run_overrides = None, args.save, args.yaml_values
    overrides = list[ConfigSource]()
    if folder is not None and not args.overwrite:
        values = loader.from_save(folder, args.mirror, args.only_plans or args.asks_help)
        if (
            values is not None
            and args.load is not None
            and not _run_started_from(args.load, values)
        ):
            # The run began with the weights alone of something else, and does not begin again.
            values = merge_over(values, {"checkpoint": {"load_optimizer": True}})
    if values is None and args.load is not None and args.loads_optimizer:
        values, folder, run_overrides = loader.from_run(args.load), args.load, {}
        overrides = [ConfigSource(str(args.config), args.yaml_values)] if args.yaml_values else []
    if values is None or folder is None:
        return None
    section = config_class_of_preset(values, folder)
    _check_same_family(folder, values, str(args.config), args.yaml_values)
    if args.model is not None and not _run_started_from(args.model, values):
        described = loader.from_model(args.model)
        _check_same_family(folder, values, args.model, described)
        overrides.append(ConfigSource(args.model, {"model": described["model"]}))
    settings = LayeredConfig(section, (ConfigSource(folder, values, True), *overrides))
    return BaseConfig(args.config or args.model or folder, settings, folder, run_overrides, folder)


def _run_started_from(model: str, run: Mapping[str, Any]) -> bool:
    """Returns whether a run started from the model of this name, which may no longer exist."""
    start_model = str(flatten_by_path(run).get("checkpoint.load"))
    return model == start_model or os.path.realpath(model) == os.path.realpath(start_model)


def _check_same_family(
    folder: str, run: Mapping[str, Any], name: str, yaml_values: Mapping[str, Any]
) -> None:
    if yaml_values.get("family", run["family"]) != run["family"]:
        raise ConfigError(
            f"{format_path(folder)} has a run of the family {run['family']}, but "
            f"{format_name(name)} is of {format_name(yaml_values['family'])}: resume that run "
            "without it, give another --save, or --overwrite to delete it and start over"
        )


# ---- a run that begins --------------------------------------------------------------------------
def _base_of_new_run(args: PreParsedArgs, loader: ConfigLoader) -> BaseConfig | None:
    """Returns the base configuration of a new run; None if the command line names none.

    It is that of a preset, a file, a run whose weights are loaded, or a model.
    """
    yaml_values, model = args.yaml_values, args.model
    user = [_read_user_source(args)] if yaml_values else []
    if model is None and "family" not in yaml_values:
        saved = None if args.load is None else loader.from_load(args.load)
        if saved is not None:
            section, name = config_class_of_preset(saved, str(args.load)), str(args.load)
            layers = (ConfigSource(name, saved, True), *user)
            return BaseConfig(args.config or name, LayeredConfig(section, layers), source_run=name)
        model = _implied_model_name(args)
    if model is None:
        nothing = not yaml_values or (args.is_user_file and "family" not in yaml_values)
        if nothing:
            return None
        return BaseConfig(user[0].name, LayeredConfig(_config_class(args), (user[0],)))
    described = loader.from_model(model)
    section, name = config_class_of_preset(described, model), args.config or model
    of_model = ConfigSource(model, described)
    if not user or not user[0].is_exhaustive:  # a file may say what the model says of itself
        named = {n: value for n, value in yaml_values.items() if n != "family"}
        return BaseConfig(name, LayeredConfig(section, (of_model, ConfigSource(name, named))))
    if yaml_values.get("family") != described["family"]:  # other settings of that do not apply
        user = [replace(user[0], values=_keep_known_fields(section, yaml_values))]
    return BaseConfig(name, LayeredConfig(section, (*user, of_model)))


def _read_user_source(args: PreParsedArgs) -> ConfigSource:
    """Returns the config values of `--config`; a preset or a run's file sets all fields."""
    whole = not args.is_user_file or (
        "family" in args.yaml_values and sets_every_field(_config_class(args), args.yaml_values)
    )
    return ConfigSource(str(args.config), args.yaml_values, whole)


def _config_class(args: PreParsedArgs) -> type[RunConfig]:
    return config_class_of_preset(args.yaml_values, str(args.config))


def _implied_model_name(args: PreParsedArgs) -> str | None:
    """Returns the default model's name, if neither `--model` nor a run in `--load` is given."""
    if args.load is not None and args.load != RANDOM:
        return args.load
    return None if args.train is None else SMALL_MODEL


def _keep_known_fields(section: type[ConfigSection], data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those of nested config values for which a config section has a field."""
    known_fields: dict[str, Any] = {}
    for name, annotation in field_annotations(section).items():
        if name in data:
            value = data[name]
            nested = is_section_type(annotation) and isinstance(value, Mapping)
            known_fields[name] = _keep_known_fields(annotation, value) if nested else value
    return known_fields
