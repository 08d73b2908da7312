"""Reading a command line: a preset, a run or a model, and a flag for every field over it."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from config.families import config_class_of
from config.flags import add_field_flags, field_overrides, spell_flags, with_search
from config.help import field_help, formatter
from config.presets import merge, placed, preset_data, preset_names, with_length
from config.sections import RunConfig
from terminal.parser import Parser, add_process_options, path_option


class Origins(Protocol):
    """Where a configuration comes from, other than a preset."""

    def saved(self, load: str) -> Mapping[str, Any] | None:
        """The configuration of the run that `--load` names, or None if that is no run."""
        ...

    def with_model(self, name: str, data: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """A configuration of the model in a Hugging Face folder or of the hub's.

        Args:
            data: how to run it, such as a preset; None: a preset for one device.
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


def read_command_line(
    description: str | None,
    presets: str | Path,
    default_preset: str,
    arguments: Sequence[str] | None = None,
    add_options: Callable[[argparse.ArgumentParser], None] | None = None,
    origins: Origins | None = None,
) -> CommandLine:
    """Read `--config`, a flag for every field of its model family, and the script's own options.

    Without `--config`, the configuration is that of the run which `--load` names, if it names one.

    Args:
        description: what the script does, the head of its `--help`.
        presets: `"finetuning"`, `"inference"`, or the path of a YAML file of presets.
        default_preset: what `--config` is when nothing else says it.
        arguments: the arguments, without the program's name; those of the process by default.
        add_options: adds the script's own options to the parser.
        origins: understands `--load` of a run, and `--model`; None: the script takes presets only.

    Raises:
        ConfigError: if anything given is unknown, ambiguous, or of the wrong type.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    preset, data = _start(given, presets, default_preset, origins)
    config_class = config_class_of(data, preset)
    parser = Parser(
        description=description,
        usage="%(prog)s [--config NAME] [--FIELD VALUE ...]",
        epilog=f"In brackets: values of {preset}. Presets: {', '.join(preset_names(presets))}",
        allow_abbrev=False,
        formatter_class=formatter,
    )
    _add_config_options(parser, default_preset, origins)
    parser.add_argument("--help-all", action="help", help="show all fields, in full")
    if add_options:
        add_options(parser)
    names = parser.names()
    add_process_options(parser)
    flags = parser.flags()
    all_fields = any(a.replace("_", "-") == "--help-all" for a in given)
    add_field_flags(parser, config_class, field_help(config_class, data, str(presets), all_fields))
    parsed = vars(parser.parse_args(spell_flags(given, config_class, flags)))
    overrides = placed(with_search(field_overrides(parsed, config_class), data))
    return CommandLine(
        config=config_class.from_dict(merge(with_length(data), overrides)),
        preset=preset,
        options=argparse.Namespace(**{name: parsed[name] for name in names if name in parsed}),
    )


def _start(
    arguments: Sequence[str], presets: str | Path, default_preset: str, origins: Origins | None
) -> tuple[str, dict[str, Any]]:
    """The configuration under the flags, and its name. It decides which flags exist."""
    parser = Parser(add_help=False, allow_abbrev=False)
    _add_config_options(parser, default_preset, origins)
    parser.add_argument("--load", "--checkpoint.load", dest="load", type=path_option)
    given = parser.parse_known_args(arguments)[0]
    evaluating = {"model": {"eval": True}} if presets == "inference" else {}
    if origins is not None and given.model is not None:
        how = None if given.config is None else preset_data(presets, given.config)
        name = given.config or given.model
        return name, merge(origins.with_model(given.model, how), evaluating)
    if given.config is not None:
        return given.config, preset_data(presets, given.config)
    if origins is not None and given.load is not None:
        saved = origins.saved(given.load)
        if saved is not None:
            return given.load, merge(saved, evaluating)
    return default_preset, preset_data(presets, default_preset)


def _add_config_options(
    parser: argparse.ArgumentParser, default_preset: str, origins: Origins | None
) -> None:
    parser.add_argument(
        "--config",
        metavar="NAME",
        help="a preset, or the path of a run's config.yml "
        f"(default: the run that --load names, else {default_preset})",
    )
    if origins is not None:
        parser.add_argument(
            "--model",
            metavar="NAME",
            type=path_option,
            help="a T5, GPT-J or Llama-shaped model of Hugging Face, a folder or the hub's: its "
            "sizes, weights and "
            "tokenizer; --config then says how to run it",
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
