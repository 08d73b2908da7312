"""Argument parser, and command-line options that several scripts share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Sequence
from typing import Any, NoReturn, Self

from config.errors import ConfigError
from config.values import PathText, ValueType
from files.formatting import format_name

LAST_PORT = 2**16 - 1


class Parser(argparse.ArgumentParser):
    """An argument parser that raises ConfigError where argparse ends the program."""

    @classmethod
    def of_script(cls, docstring: str | None) -> Self:
        """Returns a parser described by the first line of a script's docstring."""
        return cls(description=(docstring or "").partition("\n")[0])

    def flags(self) -> list[str]:
        """Returns the long flags added to the parser."""
        return [flag for flag in self._option_string_actions if flag.startswith("--")]

    def options_by_name(self) -> dict[str, argparse.Action]:
        """Returns the parser's options by the names of their long flags, with underscores."""
        actions = self._option_string_actions
        return {flag[2:].replace("-", "_"): actions[flag] for flag in self.flags()}

    def option_names(self) -> list[str]:
        """Returns the attribute names of the parser's options in the parsed namespace."""
        return [action.dest for action in self._actions]

    def hide_options(self, option_names: Collection[str]) -> None:
        """Hides rarely used options in `--help`."""
        for action in self._actions:
            if action.dest in option_names:
                action.help = argparse.SUPPRESS

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses as argparse does, but a value can begin with a dash, such as `->`."""
        given = sys.argv[1:] if args is None else args
        return super().parse_known_args(self._join_dashed_values(given), namespace)

    def _join_dashed_values(self, arguments: Sequence[str]) -> list[str]:
        """Returns arguments in which values that begin with a dash follow their flag after `=`."""
        joined = list[str]()
        for text in arguments:
            action = self._option_string_actions.get(joined[-1]) if joined else None
            takes_it = action is not None and action.nargs is None and text.startswith("-")
            if takes_it and text != "--" and not self._is_flag(text):
                joined[-1] += f"={text}"
            else:
                joined.append(text)
        return joined

    def _is_flag(self, text: str) -> bool:
        """True if a text is a flag of this parser, with or without a value."""
        return text.partition("=")[0] in self._option_string_actions

    def print_help(self, file: Any = None) -> None:
        """Prints the help text; raises an error if the disk is full."""
        print(self.format_help(), end="", file=file, flush=True)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{format_name(message, 200)}; see --help")


def parse_path_option(text: str) -> str:
    """Option type: the path of a file or folder."""
    try:
        return str(ValueType.from_annotation(PathText).check(text, "it"))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parse_count_option(text: str) -> int:
    """Option type: an integer from 1."""
    number = int(text) if text.isdecimal() and len(text) < 10 else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {format_name(text)}")
    return number


def parse_port_option(text: str) -> int:
    """Option type: a TCP port."""
    number = parse_count_option(text)
    if number > LAST_PORT:
        raise argparse.ArgumentTypeError(f"must be a port, 1 to {LAST_PORT}, not {number}")
    return number


EXPORT_OPTION: dict[str, Any] = {
    "metavar": "DIR",
    "type": parse_path_option,
    "help": "a new folder for the model, in the form that Hugging Face's from_pretrained loads",
}
"""Help of --save-hf, in the scripts that write a model for Hugging Face."""


def add_export_option(parser: argparse.ArgumentParser) -> None:
    """Adds the options that export the trained model in Hugging Face's format."""
    parser.add_argument("--save-hf", **EXPORT_OPTION)
    parser.add_argument(
        "--merge",
        nargs="?",
        const="original",
        choices=("original", "dequantized"),
        help="merge adapters into the model and write that, not the adapters alone: into its "
        "original weights, or into the dequantized ones that they were trained beside",
    )


def add_process_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "several processes, unless popdist.run, mpirun or srun starts them"
    )
    group.add_argument("--processes", type=int, metavar="N", help="how many there are")
    group.add_argument("--process", type=int, metavar="I", help="which of them this is, from 0")
    group.add_argument(
        "--coordinator", metavar="HOST:PORT", help="the host of process 0, and a free port of it"
    )
