"""What lies under the flags: a preset or a person's YAML, a model, or the run that is continued."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from config.base import ConfigSection, config_fields, field_annotations, flattened, is_section
from config.config_sources import ConfigSource, LayeredConfig, sets_every_field
from config.errors import ConfigError
from config.families import config_class_of
from config.presets import merge, preset_data
from config.run import Checkpoint
from config.sections import RunConfig
from config.values import ValueType
from files.formatting import format_name, format_path
from terminal.preparse import PreParsedArgs

RANDOM = "random"
"""In place of a model or run to load: random weights."""

SMALL_MODEL = "google/flan-t5-small"
"""The model where data are all that is given."""

_EVALUATING = ConfigSource("this program", {"model": {"eval": True}})
_OF_A_RUN = ("checkpoint.load", "checkpoint.save", "checkpoint.mirror")
"""Fields that a run which is continued has its own values of."""
_PLACES = (
    "checkpoint.mirror", "execution.quantized_cache", "training.reference_cache", "data.train",
    "data.validation",
)  # fmt: skip
"""Fields of places outside a run's folder that it reads or writes."""


class ConfigLoader(Protocol):
    """Where a configuration comes from, other than a preset."""

    def saved(self, load: str) -> Mapping[str, Any] | None:
        """What the run that `--load` names hands on; None if that is a model."""
        ...

    def run(self, load: str) -> Mapping[str, Any] | None:
        """Like `saved`, of what need not be there."""
        ...

    def begun(self, save: str, mirror: str | None, plans: bool) -> Mapping[str, Any] | None:
        """The whole configuration of the run in `--save`; None if there is none.

        Args:
            mirror: where it comes from if it is gone.
            plans: it stays there.
        """
        ...

    def placed(self, checkpoint: Checkpoint) -> Mapping[str, Any]:
        """Folders for what are addresses of an object store, by dotted names."""
        ...

    def adapter(self, folder: str, config: RunConfig) -> Mapping[str, Any]:
        """Fields for the adapter in a folder beside the configured model, nested."""
        ...

    def vocabulary(self, settings: LayeredConfig) -> Mapping[str, Any]:
        """Fields for tokens that the model which a run begins with does not have, by dotted
        names."""
        ...

    def described(self, name: str) -> Mapping[str, Any]:
        """A configuration of the model in a Hugging Face folder or of the hub's."""
        ...


@dataclass(frozen=True)
class BaseConfig:
    """What lies under the flags.

    Attributes:
        name: of the preset, file, model or folder that is given.
        run: the folder of the run that is continued; None: one begins.
        besides: what `--config` says beside that run, which has settings of its own.
        of_run: the folder of the run whose settings are taken, which may be a stranger's.
        is_nothing: nothing is named; `--help` is for models of all families.
    """

    name: str
    settings: LayeredConfig
    run: str | None = None
    besides: Mapping[str, Any] = field(default_factory=dict)
    of_run: str | None = None
    is_nothing: bool = False

    def places(self, flags: Mapping[str, Any]) -> list[str]:
        """A line on the places outside of its folder that a run names, and flags, nested, do not:
        whoever made the folder chose them."""
        if self.of_run is None:
            return []
        named, given = flattened(self.settings.sources[0].values), flattened(flags)
        inside = os.path.abspath(self.of_run)
        outside = [
            f"{name} {format_path(named[name])}"
            for name in _PLACES
            if isinstance(named.get(name), str)
            and name not in given
            and not os.path.abspath(named[name]).startswith(f"{inside}{os.sep}")
        ]
        found = ", ".join(outside)
        return [f"as the run in {format_path(self.of_run)} says: {found}"] if found else []

    def differences(self, flags: Mapping[str, Any]) -> list[str]:
        """A line for each field that flags, nested, change in the run that is continued, and for
        each that `--config` gives in vain."""
        if self.run is None:
            return []
        before, by_flags = flattened(self.settings.sources[0].values), flattened(flags)
        asked = flattened(merge(self.besides, flags))
        if asked.get("training.epochs") is not None:  # which decide
            asked.pop("training.steps", None)
        lines = []
        for leaf in config_fields(self.settings.section):
            name = leaf.path
            if name in _OF_A_RUN or name not in before or name not in asked:
                continue
            old, new = _read(leaf.type, before[name]), _read(leaf.type, asked[name])
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


def _read(kind: ValueType, value: Any) -> Any:
    """A value as its field has it, such as a number for the text of one."""
    try:
        return kind.check(value, "")
    except ValueError:
        return value


def resolve_base_config(
    first: PreParsedArgs,
    presets: str | Path,
    default_preset: str,
    loader: ConfigLoader | None,
    takes_default: bool = False,
) -> BaseConfig:
    """What the command line's flags are laid over; other arguments as for `read_command_line`.

    Raises:
        ConfigError: nothing says which model, or what is named cannot be had.
    """
    if loader is None:
        name = first.config or default_preset
        return _complete(name, first.said or preset_data(presets, name))
    evaluates = presets == "inference"
    below = (None if evaluates else _continued(first, loader)) or _begun(first, loader)
    if below is not None:
        over = [_EVALUATING] if evaluates else []
        return replace(below, settings=below.settings.with_sources(*over))
    if takes_default:
        return _complete(default_preset, preset_data(presets, default_preset))
    if not first.helps:
        raise ConfigError(
            "nothing says which model: give --model with a Hugging Face folder or name, --load "
            "with the folder of a run, or --config with a preset, such as tiny, xxl_pod64 (of "
            "Graphcore's FLAN-T5) or gptj_6B_1024_pod64 (of its GPT-J); see --help"
        )
    open_ = merge({"family": "t5"}, _EVALUATING.values if evaluates else {})
    section = config_class_of(open_, default_preset)
    settings = LayeredConfig(section, (ConfigSource(default_preset, open_),))
    return BaseConfig(default_preset, settings, is_nothing=True)


def _complete(name: str, values: Mapping[str, Any]) -> BaseConfig:
    """What says all that there is to say, or is completed by defaults."""
    return BaseConfig(
        name, LayeredConfig(config_class_of(values, name), (ConfigSource(name, values, True),))
    )


# ---- a run that is continued --------------------------------------------------------------------
def _continued(first: PreParsedArgs, loader: ConfigLoader) -> BaseConfig | None:
    """The settings of the run in `--save`; else those of the run in `--load`, with what `--config`
    says over them. None if there is no such run."""
    values, folder, besides = None, first.save, first.said
    over = list[ConfigSource]()
    if folder is not None and not first.overwrite:
        values = loader.begun(folder, first.mirror, first.plans or first.helps)
        if values is not None and first.load is not None and not _is_same(first.load, values):
            # The run began with the weights alone of something else, and does not begin again.
            values = merge(values, {"checkpoint": {"load_optimizer": True}})
    if values is None and first.load is not None and first.continues:
        values, folder, besides = loader.run(first.load), first.load, {}
        over = [ConfigSource(str(first.config), first.said)] if first.said else []
    if values is None or folder is None:
        return None
    section = config_class_of(values, folder)
    _check_family(folder, values, str(first.config), first.said)
    if first.model is not None and not _is_same(first.model, values):
        described = loader.described(first.model)
        _check_family(folder, values, first.model, described)
        over.append(ConfigSource(first.model, {"model": described["model"]}))
    settings = LayeredConfig(section, (ConfigSource(folder, values, True), *over))
    return BaseConfig(first.config or first.model or folder, settings, folder, besides, folder)


def _is_same(model: str, run: Mapping[str, Any]) -> bool:
    """Whether a run began with the model, which may be gone."""
    begun = str(flattened(run).get("checkpoint.load"))
    return model == begun or os.path.realpath(model) == os.path.realpath(begun)


def _check_family(folder: str, run: Mapping[str, Any], name: str, said: Mapping[str, Any]) -> None:
    if said.get("family", run["family"]) != run["family"]:
        raise ConfigError(
            f"{format_path(folder)} has a run of the family {run['family']}, but "
            f"{format_name(name)} is of {format_name(said['family'])}: continue that run without "
            "it, give another --save, or --overwrite to delete it and start over"
        )


# ---- a run that begins --------------------------------------------------------------------------
def _begun(first: PreParsedArgs, loader: ConfigLoader) -> BaseConfig | None:
    """The settings of a preset, a file, a run whose weights are taken, or a model; None if nothing
    is named."""
    said, model = first.said, first.model
    own = [_layer(first)] if said else []
    if model is None and "family" not in said:
        saved = None if first.load is None else loader.saved(first.load)
        if saved is not None:
            section, name = config_class_of(saved, str(first.load)), str(first.load)
            layers = (ConfigSource(name, saved, True), *own)
            return BaseConfig(first.config or name, LayeredConfig(section, layers), of_run=name)
        model = _model_of(first)
    if model is None:
        nothing = not said or (first.is_user_file and "family" not in said)
        return (
            None if nothing else BaseConfig(own[0].name, LayeredConfig(_family(first), (own[0],)))
        )
    described = loader.described(model)
    section, name = config_class_of(described, model), first.config or model
    of_model = ConfigSource(model, described)
    if not own or not own[0].is_exhaustive:  # a file may say what the model says of itself
        named = {n: value for n, value in said.items() if n != "family"}
        return BaseConfig(name, LayeredConfig(section, (of_model, ConfigSource(name, named))))
    if said.get("family") != described["family"]:  # other settings of that do not apply
        own = [replace(own[0], values=_known(section, said))]
    return BaseConfig(name, LayeredConfig(section, (*own, of_model)))


def _layer(first: PreParsedArgs) -> ConfigSource:
    """What `--config` names. A preset is whole, and so is the config.yml of a run."""
    whole = not first.is_user_file or (
        "family" in first.said and sets_every_field(_family(first), first.said)
    )
    return ConfigSource(str(first.config), first.said, whole)


def _family(first: PreParsedArgs) -> type[RunConfig]:
    return config_class_of(first.said, str(first.config))


def _model_of(first: PreParsedArgs) -> str | None:
    """The model that is meant where `--model` names none and `--load` no run."""
    if first.load is not None and first.load != RANDOM:
        return first.load
    return None if first.train is None else SMALL_MODEL


def _known(section: type[ConfigSection], data: Mapping[str, Any]) -> dict[str, Any]:
    """The part of some data that a section has fields for."""
    known_fields: dict[str, Any] = {}
    for name, annotation in field_annotations(section).items():
        if name in data:
            value = data[name]
            nested = is_section(annotation) and isinstance(value, Mapping)
            known_fields[name] = _known(annotation, value) if nested else value
    return known_fields
