"""Every configuration field as a command-line flag.

A field answers to its dotted name and to every ending of it that no other field shares:
`--training.optimizer.learning_rate.maximum`, `--learning_rate.maximum` and `--maximum` are one.
Dashes and underscores are equal.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from config.base import Section, leaves
from config.errors import ConfigError, close_names

# Of the fields that share a last name, the one that `--NAME` means.
SHORTHANDS = {"steps": "training.steps"}


def add_field_flags(parser: argparse.ArgumentParser, config_class: type[Section]) -> None:
    """Give the parser one flag per field, in a group per section, by its shortest name.

    The texts given for a field are found in the parsed namespace under its dotted name.
    """
    shortest = shortest_names(config_class)
    groups: dict[str, argparse._ArgumentGroup] = {}
    for leaf in leaves(config_class):
        section = leaf.dotted.rpartition(".")[0] or "configuration"
        if section not in groups:
            groups[section] = parser.add_argument_group(section)
        groups[section].add_argument(
            f"--{shortest[leaf.dotted]}",
            dest=leaf.dotted,
            default=argparse.SUPPRESS,
            metavar=leaf.type.metavar(),
            help=leaf.doc.replace("%", "%%"),
            # A bare `--flag` switches a boolean on.
            nargs="?" if leaf.type.kind is bool else None,
            const="true" if leaf.type.kind is bool else None,
        )


def spell_flags(
    arguments: Sequence[str], config_class: type[Section], options: Iterable[str]
) -> list[str]:
    """The arguments with every flag spelled as the parser knows it.

    Args:
        arguments: the command line.
        config_class: the root section.
        options: the flags that are no fields, such as `--wandb-name`.

    Raises:
        ConfigError: for an unknown or ambiguous flag.
    """
    shortest = shortest_names(config_class)
    known = {option.lstrip("-").replace("-", "_"): option for option in options}
    spelled = []
    for argument in arguments:
        if not argument.startswith("--"):
            spelled.append(argument)
            continue
        name, equals, value = argument[2:].partition("=")
        key = name.replace("-", "_")
        flag = known[key] if key in known else f"--{shortest[_field_of(key, config_class, known)]}"
        spelled.append(flag + equals + value)
    return spelled


def field_overrides(parsed: Mapping[str, str], config_class: type[Section]) -> dict[str, Any]:
    """The fields given on the command line as nested plain data, their texts read by type.

    Args:
        parsed: dotted names to texts; other names are passed over.
        config_class: the root section.

    Raises:
        ConfigError: for a text that the field cannot have.
    """
    nested: dict[str, Any] = {}
    for leaf in leaves(config_class):
        if leaf.dotted not in parsed:
            continue
        *sections, name = leaf.dotted.split(".")
        target = nested
        for section in sections:
            target = target.setdefault(section, {})
        try:
            target[name] = leaf.type.parse(parsed[leaf.dotted], leaf.dotted)
        except ValueError as error:
            raise ConfigError(str(error)) from None
    return nested


def shortest_names(config_class: type[Section]) -> dict[str, str]:
    """Dotted name of each field to the shortest ending of it that means this field alone."""
    dotted = [leaf.dotted for leaf in leaves(config_class)]
    return {field: _shortest_name(field, dotted) for field in dotted}


def _shortest_name(field: str, dotted: Sequence[str]) -> str:
    parts = field.split(".")
    endings = [".".join(parts[start:]) for start in reversed(range(len(parts)))]
    return next(name for name in endings if _fields_named(name, dotted) == [field])


def _fields_named(name: str, dotted: Iterable[str]) -> list[str]:
    """The fields that `name` may mean: exactly one, or several where it is ambiguous."""
    matches = [field for field in dotted if f".{field}".endswith(f".{name}")]
    preferred = name if name in matches else SHORTHANDS.get(name)
    return [preferred] if preferred in matches else matches


def _field_of(name: str, config_class: type[Section], options: Iterable[str]) -> str:
    shortest = shortest_names(config_class)
    matches = _fields_named(name, shortest)
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise ConfigError(f"--{name} is ambiguous; say {_flag_list(matches)}")
    inside = [flag for field, flag in shortest.items() if f".{name}." in f".{field}"]
    if inside:
        raise ConfigError(f"--{name} is a section; set a field of it: {_flag_list(inside)}")
    known = shortest if "." in name else [*options, *shortest.values()]
    close = close_names(name, known)
    hint = f"did you mean {_flag_list(close)}?" if close else "--help lists all of them"
    raise ConfigError(f"unknown option --{name}; {hint}")


def _flag_list(names: Iterable[str]) -> str:
    return " or ".join(f"--{name}" for name in names)
