"""What every script shares: reading its command line, and ending on a person's mistake.

A script is a short main:

    @entry_point(popxl.DeviceError)
    def main(arguments: Sequence[str] | None = None) -> None:
        line = read_command_line(__doc__, "finetuning", "xxl_pod64", arguments)
        ...

    if __name__ == "__main__":
        sys.exit(main())
"""

from __future__ import annotations

import argparse
import functools
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Protocol

from config.errors import ConfigError, Notice, UserError
from config.families import config_class_of
from config.flags import add_field_flags, field_overrides, spell_flags
from config.presets import load_config, preset_data, preset_names
from config.sections import RunConfig


class Main(Protocol):
    """A script's main: takes arguments, by default the process's own."""

    def __call__(self, arguments: Sequence[str] | None = None) -> None: ...


class EntryPoint(Protocol):
    """A main that returns an exit code."""

    def __call__(self, arguments: Sequence[str] | None = None) -> int: ...


USER_ERROR = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells count


@dataclass(frozen=True)
class CommandLine:
    """A command line, read."""

    config: RunConfig
    """The preset with the flags over it."""

    preset: str
    """The preset's name, or the path of the file that was given instead."""

    options: argparse.Namespace
    """The values of the script's own options; each name with underscores."""


def read_command_line(
    description: str | None,
    presets: str | Path,
    default_preset: str,
    arguments: Sequence[str] | None = None,
    add_options: Callable[[argparse.ArgumentParser], None] | None = None,
) -> CommandLine:
    """Read `--config`, a flag for every field of its model family, and the script's own options.

    Args:
        description: what the script does, the head of its `--help`.
        presets: `"finetuning"`, `"inference"`, or the path of a YAML file of presets.
        default_preset: what `--config` is when not given.
        arguments: the arguments, without the program's name; those of the process by default.
        add_options: adds the script's own options to the parser.

    Raises:
        ConfigError: if anything given is unknown, ambiguous, or of the wrong type.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    preset = _preset_of(given, default_preset)
    config_class = config_class_of(preset_data(presets, preset), preset)

    parser = _Parser(
        description=description,
        usage="%(prog)s [--config NAME] [--FIELD VALUE ...]",
        epilog=f"presets: {', '.join(preset_names(presets))}",
        allow_abbrev=False,
    )
    _add_config_option(parser, default_preset)
    if add_options:
        add_options(parser)
    flags, names = parser.flags(), parser.names()
    add_field_flags(parser, config_class)
    parsed = vars(parser.parse_args(spell_flags(given, config_class, flags)))
    return CommandLine(
        config=load_config(config_class, presets, preset, field_overrides(parsed, config_class)),
        preset=preset,
        options=argparse.Namespace(**{name: parsed[name] for name in names if name in parsed}),
    )


def add_reporting_options(parser: argparse.ArgumentParser) -> None:
    """Options of a script that trains: where its run directory is, and Weights & Biases."""
    group = parser.add_argument_group("reporting")
    group.add_argument(
        "--run-dir",
        metavar="DIR",
        help="where config.yml, metrics.jsonl and the loss curve go; by default what --save names, "
        "else a new directory under runs/",
    )
    group.add_argument("--wandb", action="store_true", help="log the run to Weights & Biases")
    group.add_argument("--wandb-name", metavar="NAME", help="name of the Weights & Biases run")


def add_export_option(parser: argparse.ArgumentParser) -> None:
    """The option that writes a model for Hugging Face."""
    parser.add_argument(
        "--save-hf",
        metavar="DIR",
        help="a new folder for the model, in the form that Hugging Face's from_pretrained loads",
    )


def entry_point(
    *user_errors: type[Exception],
) -> Callable[[Main], EntryPoint]:
    """Make a script's main return an exit code, and say a person's mistake in one sentence.

    `UserError`, and what `user_errors` names, end with the message on stderr and code 2;
    an interrupt from the keyboard ends with code 130. Every other exception is a defect of ours
    and keeps its traceback. A `Notice` is shown as one line.
    """

    expected: tuple[type[Exception], ...] = (UserError, *user_errors)

    def decorate(main: Main) -> EntryPoint:
        @functools.wraps(main)
        def run(arguments: Sequence[str] | None = None) -> int:
            try:
                with _plain_notices():
                    main(arguments)
            except expected as error:
                print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
                return USER_ERROR
            except KeyboardInterrupt:
                print("interrupted", file=sys.stderr)
                return INTERRUPTED
            return 0

        return run

    return decorate


@contextmanager
def _plain_notices() -> Iterator[None]:
    """Show notices without the place in the code that Python adds to warnings."""
    usual = warnings.formatwarning

    def formatwarning(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        line: str | None = None,
    ) -> str:
        if issubclass(category, Notice):
            return f"warning: {message}\n"
        return usual(message, category, filename, lineno, line)

    warnings.formatwarning = formatwarning
    try:
        yield
    finally:
        warnings.formatwarning = usual


def _preset_of(arguments: Sequence[str], default_preset: str) -> str:
    """The value of `--config`, which decides what other flags there are."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    _add_config_option(parser, default_preset)
    return parser.parse_known_args(arguments)[0].config


def _add_config_option(parser: argparse.ArgumentParser, default_preset: str) -> None:
    parser.add_argument(
        "--config",
        metavar="NAME",
        default=default_preset,
        help=f"a preset, or the path of a run's config.yml (default: {default_preset})",
    )


class _Parser(argparse.ArgumentParser):
    """A parser that leaves the ending of the program to `entry_point`."""

    def flags(self) -> list[str]:
        """The long flags added so far."""
        return [flag for flag in self._option_string_actions if flag.startswith("--")]

    def names(self) -> list[str]:
        """The names under which the options added so far are found in the namespace."""
        return [action.dest for action in self._actions]

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see --help")
