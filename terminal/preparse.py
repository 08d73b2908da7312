"""The first reading of a command line: what names the settings that lie under its flags, and so
decides which flags there are."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from config.base import flattened, nested
from config.presets import merge, placed, preset_data
from config.user_yaml import MODEL_KEY, OPTIONS_KEY, is_user_file
from terminal.file_options import AddOptions, as_arguments, options_of
from terminal.parser import Parser, path_option


@dataclass(frozen=True)
class PreParsedArgs:
    """What a command line names, and the file of its `--config` where flags do not.

    Attributes:
        arguments: the command line, after the options that the file gives.
        config: the preset or file.
        said: what that says.
        model: of Hugging Face.
        load, save, mirror, train: the fields of these names.
        continues: whether the state of a run in `load` is taken whole.
        overwrite: the run in `save` is not continued.
        plans: nothing is run.
        helps: the help is asked for.
    """

    arguments: Sequence[str]
    config: str | None
    said: Mapping[str, Any]
    model: str | None
    load: str | None
    save: str | None
    mirror: str | None
    train: str | None
    continues: bool
    overwrite: bool
    plans: bool
    helps: bool

    @property
    def is_user_file(self) -> bool:
        """Whether `config` is a person's file, not a preset."""
        return is_user_file(self.config)

    @classmethod
    def from_arguments(
        cls,
        arguments: Sequence[str],
        presets: str | Path,
        with_models: bool,
        add_options: AddOptions | None = None,
    ) -> PreParsedArgs:
        """Read a command line.

        Args:
            with_models: it may name models and runs.
            add_options: see `read_command_line`.

        Raises:
            ConfigError: the preset or file cannot be read.
        """
        given, flags = _read(arguments, with_models)
        said: Mapping[str, Any] = {}
        named = None
        if given.config is not None:
            options = options_of(add_options)
            read = preset_data(presets, given.config, options)
            if (of_file := read.pop(OPTIONS_KEY, None)) is not None:
                arguments = [*as_arguments(of_file, options), *arguments]
                given, flags = _read(arguments, with_models)
            named = read.pop(MODEL_KEY, None) if with_models else None
            said = placed(read)
        fields = flattened(merge(said, nested(flags)))

        def text(name: str) -> str | None:
            return value if isinstance(value := fields.get(name), str) else None

        return cls(
            arguments=arguments,
            config=given.config,
            said=said,
            model=getattr(given, "model", None) or named,
            load=text("checkpoint.load"),
            save=text("checkpoint.save"),
            mirror=text("checkpoint.mirror"),
            train=text("data.train"),
            continues=str(fields.get("checkpoint.load_optimizer")).lower() != "false",
            overwrite=given.overwrite,
            plans=given.plan is not None,
            helps=given.help,
        )


def add_config_options(
    parser: argparse.ArgumentParser, with_models: bool, default: str = ""
) -> None:
    """Add the options that name what lies under the flags.

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
            type=path_option,
            help="a T5, BART, GPT-J or Llama-shaped model of Hugging Face: a folder, or a name on "
            "the hub; --config then says how to run it, else the program chooses",
        )


def _read(arguments: Sequence[str], with_models: bool) -> tuple[argparse.Namespace, dict[str, Any]]:
    """The options, and the fields by dotted names."""
    parser = Parser(add_help=False, allow_abbrev=False)
    add_config_options(parser, with_models)
    field: dict[str, Any] = {"default": argparse.SUPPRESS}
    for name in ("load", "save"):
        dotted = f"checkpoint.{name}"
        parser.add_argument(f"--{name}", f"--{dotted}", dest=dotted, type=path_option, **field)
    parser.add_argument("--checkpoint.mirror", **field)
    parser.add_argument("--data.train", **field)
    parser.add_argument("--checkpoint.load_optimizer", nargs="?", const="true", **field)
    parser.add_argument("--overwrite", action="store_true")
    plans = (f"--plan{end}" for end in ("", "_json", "_picture", "_trace"))
    parser.add_argument(*plans, nargs="?", const="", dest="plan")
    parser.add_argument("-h", "--help", "--help_all", action="store_true", dest="help")
    given = parser.parse_known_args([_spelled(argument) for argument in arguments])[0]
    return given, {name: value for name, value in vars(given).items() if "." in name}


def _spelled(argument: str) -> str:
    """A flag with underscores, other arguments as they are."""
    name, equals, value = argument.partition("=")
    if not argument.startswith("--"):
        return argument
    return f"--{name[2:].replace('-', '_')}{equals}{value}"
