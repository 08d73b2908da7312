"""Script options in the user's YAML file, converted to command-line arguments."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from config.errors import ConfigError
from files.formatting import format_value
from files.yaml_files import location_prefix
from terminal.parser import Parser

AddOptions = Callable[[argparse.ArgumentParser], None]


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
