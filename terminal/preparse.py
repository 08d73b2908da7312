"""First pass over a command line: finds the base configuration, which decides the flags."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from config.base import flatten_by_path, nest_by_path
from config.errors import ConfigError
from config.presets import is_user_file, load_preset, merge_over, with_absolute_paths
from files.formatting import format_value
from files.yaml_files import location_prefix
from terminal.parser import Parser, parse_path_option

AddOptions = Callable[[argparse.ArgumentParser], None]


@dataclass(frozen=True)
class PreParsedArgs:
    """Values of the command-line options that name the base configuration.

    Attributes:
        arguments: options of the file, then the command line.
        config: preset or file.
        yaml_values: its values, nested.
        model: Hugging Face model.
        load, save, mirror, train: values of these fields.
        loads_optimizer: resume the run in `load`, not only its weights.
        overwrite: delete the run in `save`.
        only_plans: nothing is run.
        asks_help: True for `--help`.
    """

    arguments: Sequence[str]
    config: str | None
    yaml_values: Mapping[str, Any]
    model: str | None
    load: str | None
    save: str | None
    mirror: str | None
    train: str | None
    loads_optimizer: bool
    overwrite: bool
    only_plans: bool
    asks_help: bool

    @property
    def is_user_file(self) -> bool:
        """True if `--config` names the user's file, not a preset."""
        return is_user_file(self.config)

    @classmethod
    def from_arguments(
        cls,
        arguments: Sequence[str],
        presets: str | Path,
        with_models: bool,
        add_options: AddOptions | None = None,
    ) -> PreParsedArgs:
        """Pre-parses a command line for options that name the base configuration.

        Args:
            with_models: it may name models and runs.
            add_options: see `read_command_line`.

        Raises:
            ConfigError: the preset or file cannot be read.
        """
        parsed, flags = _parse_base_options(arguments, with_models)
        yaml_values: Mapping[str, Any] = {}
        named = None
        if parsed.config is not None:
            options = script_options(add_options)
            read = load_preset(presets, parsed.config, options)
            if is_user_file(parsed.config):
                from config.user_yaml import MODEL_KEY, OPTIONS_KEY

                if (of_file := read.pop(OPTIONS_KEY, None)) is not None:
                    arguments = [*options_to_arguments(of_file, options), *arguments]
                    parsed, flags = _parse_base_options(arguments, with_models)
                named = read.pop(MODEL_KEY, None) if with_models else None
            yaml_values = with_absolute_paths(read)
        fields = flatten_by_path(merge_over(yaml_values, nest_by_path(flags)))

        def text_of_option(name: str) -> str | None:
            return value if isinstance(value := fields.get(name), str) else None

        return cls(
            arguments=arguments,
            config=parsed.config,
            yaml_values=yaml_values,
            model=getattr(parsed, "model", None) or named,
            load=text_of_option("checkpoint.load"),
            save=text_of_option("checkpoint.save"),
            mirror=text_of_option("checkpoint.mirror"),
            train=text_of_option("data.train"),
            loads_optimizer=str(fields.get("checkpoint.load_optimizer")).lower() != "false",
            overwrite=parsed.overwrite,
            only_plans=parsed.plan is not None,
            asks_help=parsed.help,
        )


def add_config_options(
    parser: argparse.ArgumentParser, with_models: bool, default: str = ""
) -> None:
    """Adds the options that name the base configuration, `--config` and `--model`.

    Args:
        with_models: also `--model`.
        default: what is meant without them, for the help.
    """
    parser.add_argument(
        "--config",
        metavar="NAME",
        help="a preset, or a YAML file: a run's config.yml, or your own, whose rest the program "
        f"chooses (default: {default})",
    )
    if with_models:
        parser.add_argument(
            "--model",
            metavar="NAME",
            type=parse_path_option,
            help="a T5, BART, T5Gemma, GPT-J or Llama-shaped model of Hugging Face: a folder, or a "
            "name on the hub; --config then says how to run it, else the program chooses",
        )


def _parse_base_options(
    arguments: Sequence[str], with_models: bool
) -> tuple[argparse.Namespace, dict[str, Any]]:
    """Parses options that name the base configuration; returns also field values by path."""
    parser = Parser(add_help=False, allow_abbrev=False)
    add_config_options(parser, with_models)
    field: dict[str, Any] = {"default": argparse.SUPPRESS}
    for name in ("load", "save"):
        dotted = f"checkpoint.{name}"
        parser.add_argument(
            f"--{name}", f"--{dotted}", dest=dotted, type=parse_path_option, **field
        )
    parser.add_argument("--checkpoint.mirror", **field)
    parser.add_argument("--data.train", **field)
    parser.add_argument("--checkpoint.load_optimizer", nargs="?", const="true", **field)
    parser.add_argument("--overwrite", action="store_true")
    plans = (f"--plan{end}" for end in ("", "_json", "_picture", "_trace"))
    parser.add_argument(*plans, nargs="?", const="", dest="plan")
    parser.add_argument("-h", "--help", "--help_all", action="store_true", dest="help")
    parsed = parser.parse_known_args([_with_underscores(argument) for argument in arguments])[0]
    return parsed, {name: value for name, value in vars(parsed).items() if "." in name}


def _with_underscores(argument: str) -> str:
    """Returns a flag with its dashes replaced by underscores; other arguments unchanged."""
    name, equals, value = argument.partition("=")
    if not argument.startswith("--"):
        return argument
    return f"--{name[2:].replace('-', '_')}{equals}{value}"


def script_options(add_options: AddOptions | None) -> dict[str, argparse.Action]:
    """Returns the command-line options of a script by flag name, with underscores."""
    parser = Parser(add_help=False, allow_abbrev=False)
    if add_options is not None:
        add_options(parser)
    return parser.options_by_name()


def options_to_arguments(
    option_values: Mapping[str, Any], options: Mapping[str, argparse.Action]
) -> list[str]:
    """Returns script options in a YAML file as command-line arguments.

    False and null give no argument.

    Raises:
        ConfigError: a value is a list or a section, or a switch is not true or false.
    """
    arguments = []
    for name, value in option_values.items():
        action, place = options[name], location_prefix(option_values, name)
        flag = action.option_strings[0]
        if value is None or value is False:
            continue
        if action.nargs == 0 and value is not True:
            raise ConfigError(f"{place}{name} is {format_value(value)}, but must be true or false")
        if value is True and action.nargs not in (0, "?"):
            raise ConfigError(f"{place}{name} is true, but must be a value, as --{name} takes")
        if not isinstance(value, bool | int | float | str):
            raise ConfigError(
                f"{place}{name} is {format_value(value)}, but must be a text or a number"
            )
        arguments.append(flag if value is True else f"{flag}={value}")
    return arguments
