"""Reading a command line: a preset, a run or a model, and a flag for every field over it."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from config.base import flattened
from config.chosen import CHOSEN
from config.errors import ConfigError
from config.families import config_class_of
from config.flags import (
    add_field_flags,
    field_overrides,
    section_groups,
    spell_flags,
    with_search,
)
from config.flags_of_others import check_flags
from config.help import RARE, field_help, formatter
from config.presets import (
    merge,
    placed,
    preset_data,
    preset_names,
    with_length,
    with_some_batch,
)
from config.sections import RunConfig
from terminal.parser import Parser, add_process_options, path_option

RANDOM = "random"
"""In place of a model or run to load: random weights."""

SMALL_MODEL = "google/flan-t5-small"
"""The model where data are all that is given."""


class Origins(Protocol):
    """Where a configuration comes from, other than a preset."""

    def saved(self, load: str) -> Mapping[str, Any] | None:
        """The configuration of the run that `--load` names, or None if that is no run."""
        ...

    def placed(self, config: RunConfig) -> RunConfig:
        """A configuration with folders in place of the addresses of an object store."""
        ...

    def with_model(
        self, name: str, data: Mapping[str, Any] | None, save: str | None = None
    ) -> Mapping[str, Any]:
        """A configuration of the model in a Hugging Face folder or of the hub's.

        Args:
            data: how to run it, such as a preset; None: that is open.
            save: a run's folder. If it began with a model that is gone, it knows what that was.
        """
        ...


@dataclass(frozen=True)
class CommandLine:
    """A parsed command line. Only scripts see it; they pass on its parts as typed values."""

    config: RunConfig
    """The preset with the flags over it."""

    preset: str
    """The preset's name, or the path of the file or run that was given instead."""

    options: argparse.Namespace
    """The values of the script's own options; each name with underscores."""

    given: frozenset[str] | None = None
    """Dotted names of the fields that flags give, where no preset or run says the others, which
    `planning.choices` chooses; None: nothing is open."""

    over_run: frozenset[str] | None = None
    """The same over a saved run's configuration; None: there is none."""


def read_command_line(
    description: str | None,
    presets: str | Path,
    default_preset: str,
    arguments: Sequence[str] | None = None,
    add_options: Callable[[argparse.ArgumentParser], None] | None = None,
    origins: Origins | None = None,
) -> CommandLine:
    """Read `--config`, a flag for every field of its model family, and the script's own options.

    Without `--config`, the configuration is that of the run which `--load` names. How to run a
    model of Hugging Face, which `--model` or `--load` names, is open then.

    Args:
        description: what the script does, the head of its `--help`.
        presets: `"finetuning"`, `"inference"`, or the path of a YAML file of presets.
        default_preset: what `--config` is in help texts, and for scripts that take presets only.
        arguments: the arguments, without the program's name; those of the process by default.
        add_options: adds the script's own options to the parser.
        origins: understands `--load` of a run, and `--model`; None: the script takes presets only.

    Raises:
        ConfigError: if anything given is unknown, ambiguous, or of the wrong type.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    check_flags(given)
    preset, data, is_open = _start(given, presets, default_preset, origins)
    config_class = config_class_of(data, preset)
    parser = Parser(
        description=description,
        usage="%(prog)s [--config NAME] [--FIELD VALUE ...]",
        epilog=_epilog(preset, presets, is_open),
        allow_abbrev=False,
        formatter_class=formatter,
    )
    _add_config_options(parser, origins)
    parser.add_argument("--help-all", action="help", help="show all fields, in full")
    groups = section_groups(parser)
    if add_options:
        add_options(parser)
    names = parser.names()
    add_process_options(parser)
    flags = parser.flags()
    all_fields = any(a.replace("_", "-") == "--help-all" for a in given)
    chosen = CHOSEN if is_open else ()
    if not all_fields:
        parser.shorten(RARE)
    help_of = field_help(config_class, data, str(presets), all_fields, chosen)
    add_field_flags(groups, config_class, help_of)
    parsed = vars(parser.parse_args(spell_flags(given, config_class, flags)))
    overrides = placed(with_search(field_overrides(parsed, config_class), data))
    whole = merge(with_length(data), overrides)
    config = config_class.from_dict(with_some_batch(whole, overrides) if is_open else whole)
    flagged = frozenset(flattened(overrides))
    return CommandLine(
        config=config if origins is None else origins.placed(config),
        preset=preset,
        options=argparse.Namespace(**{name: parsed[name] for name in names if name in parsed}),
        given=flagged if is_open else None,
        over_run=flagged if origins and not is_open and parsed["config"] is None else None,
    )


def _start(
    arguments: Sequence[str], presets: str | Path, default_preset: str, origins: Origins | None
) -> tuple[str, Mapping[str, Any], bool]:
    """The configuration under the flags, its name, and whether it leaves open how the model is run.
    It decides which flags exist."""
    parser = Parser(add_help=False, allow_abbrev=False)
    _add_config_options(parser, origins)
    parser.add_argument("--load", "--checkpoint.load", dest="load", type=path_option)
    parser.add_argument("--save", "--checkpoint.save", dest="save", type=path_option)
    parser.add_argument("--data.train", dest="data")
    given = parser.parse_known_args(arguments)[0]
    evaluating = {"model": {"eval": True}} if presets == "inference" else {}
    if given.config is not None:
        data: Mapping[str, Any] = preset_data(presets, given.config)
        if origins is not None and given.model is not None:
            data = merge(origins.with_model(given.model, data, given.save), evaluating)
        return given.config, data, False
    if origins is None:
        return default_preset, preset_data(presets, default_preset), False
    saved = None
    if given.model is None and given.load is not None:
        saved = origins.saved(given.load)
    if saved is not None:
        return given.load, merge(saved, evaluating), False
    model = given.model or _model_of(given.load, given.data)
    if model is not None:
        return model, merge(origins.with_model(model, None, given.save), evaluating), True
    if not {"-h", "--help", "--help-all"} & set(arguments):
        raise ConfigError(
            "nothing says which model: give --model with a Hugging Face folder or name, --load "
            "with the folder of a run, or --config with a preset, such as tiny; see --help"
        )
    return default_preset, {"family": "t5", **evaluating}, True


def _epilog(preset: str, presets: str | Path, is_open: bool) -> str:
    """The end of a help text."""
    used = (
        "what is used where no flag says it; the program chooses by model, data and machine"
        if is_open
        else f"the values of {preset}"
    )
    return f"In brackets: {used}. Presets for --config: {', '.join(preset_names(presets))}"


def _model_of(load: str | None, data: str | None) -> str | None:
    """The model that is meant where `--model` names none and `--load` no run."""
    if load is not None and load != RANDOM:
        return load
    return None if data is None else SMALL_MODEL


def _add_config_options(parser: argparse.ArgumentParser, origins: Origins | None) -> None:
    parser.add_argument(
        "--config",
        metavar="NAME",
        help="a preset, or the path of a run's config.yml (default: the run that --load names; "
        "else the program chooses by model, data and machine)",
    )
    if origins is not None:
        parser.add_argument(
            "--model",
            metavar="NAME",
            type=path_option,
            help="a T5, GPT-J or Llama-shaped model of Hugging Face, a folder or the hub's: its "
            "sizes, weights and "
            "tokenizer; --config then says how to run it, else the program chooses",
        )


def typed(script: str, arguments: Sequence[str] | None) -> str:
    """A command in the form in which it can be typed again.

    Args:
        script: its file.
        arguments: None: those of this process.
    """
    return shlex.join(
        ["python3", Path(script).name, *(sys.argv[1:] if arguments is None else arguments)]
    )
