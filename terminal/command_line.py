"""Command-line parser: a base configuration, and a flag for each of its fields."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from config.base import config_fields, flatten_by_path, nest_by_path
from config.config_sources import (
    ConfigSource,
    LayeredConfig,
    disable_preference_dropout,
    drop_overridden_epochs,
    fit_micro_batch_to_batch,
    resolve_contradictions,
    with_default_epochs_and_batch,
)
from config.errors import ConfigError, UserError
from config.families import FAMILIES
from config.flags import (
    ALL_USED,
    FieldHelp,
    UnusedFields,
    add_field_flags,
    add_section_groups,
    infer_search_strategy,
    normalize_flag_spelling,
    parse_field_overrides,
)
from config.presets import with_absolute_paths
from config.sections import RunConfig
from files.formatting import format_name, format_path
from terminal.base_config import BaseConfig, ConfigLoader, resolve_base_config
from terminal.parser import Parser, add_process_options
from terminal.preparse import AddOptions, PreParsedArgs, add_config_options
from terminal.screen import say


@dataclass(frozen=True)
class CommandLine:
    """A parsed command line: the configuration, its origin and the script's options."""

    config: RunConfig
    """The preset with the flags over it."""

    preset: str
    """The preset's name, or the path of the file or run that was given instead."""

    options: argparse.Namespace
    """The values of the script's own options; each name with underscores."""

    settings: LayeredConfig
    """Sources of `config`; `planning.auto_config` completes their auto fields."""


def read_command_line(
    description: str | None,
    presets: str | Path,
    default_preset: str,
    arguments: Sequence[str] | None = None,
    add_options: AddOptions | None = None,
    loader: ConfigLoader | None = None,
    takes_default: bool = False,
    unused: UnusedFields = ALL_USED,
) -> CommandLine:
    """Parses `--config`, a flag for each configuration field, and the script's options.

    Without `--config`, the configuration is that of the run which `--load` names. How to run a
    model of Hugging Face, which `--model` or `--load` names, is open then.

    Args:
        description: what the script does, the head of its `--help`.
        presets: `"finetuning"`, `"inference"`, or the path of a YAML file of presets.
        default_preset: what `--config` is in help texts, and for scripts that take presets only.
        arguments: the arguments, without the program's name; those of the process by default.
        add_options: adds the script's own options to the parser.
        loader: understands `--load` of a run, and `--model`; None: the script takes presets only.
        takes_default: run the default preset where nothing is named.
        unused: fields whose flags are refused.

    Raises:
        ConfigError: if anything given is unknown, ambiguous, or of the wrong type.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    with _explain_foreign_flags(given):
        unused.check_arguments(given)
        args = PreParsedArgs.from_arguments(given, presets, loader is not None, add_options)
        base = resolve_base_config(args, presets, default_preset, loader, takes_default)
        section = base.settings.section
        data = base.settings.explicit_values
        parser = Parser(
            description=description,
            usage="%(prog)s [--config NAME] [--FIELD VALUE ...]",
            allow_abbrev=False,
        )
        default = _format_default_config(default_preset, loader, takes_default)
        add_config_options(parser, with_models=loader is not None, default=default)
        parser.add_argument("--help-all", action="help", help="show all fields, in full")
        groups = add_section_groups(parser)
        if add_options:
            add_options(parser)
        names = parser.option_names()
        add_process_options(parser)
        flags = parser.flags()
        get_field_help: Callable[[type[RunConfig]], FieldHelp] = _no_field_help
        if args.asks_help:
            from terminal.help_texts import add_help_texts

            all_fields = any(a.replace("_", "-") == "--help-all" for a in given)
            get_field_help = add_help_texts(parser, base, str(presets), all_fields, unused)
        _add_fields(groups, base, get_field_help)
        parsed = vars(parser.parse_args(normalize_flag_spelling(args.arguments, section, flags)))
        settings = _merge_settings(
            base, infer_search_strategy(parse_field_overrides(parsed, section), data), loader
        )
        return CommandLine(
            config=settings.config,
            preset=base.name,
            options=argparse.Namespace(**{name: parsed[name] for name in names if name in parsed}),
            settings=settings,
        )


@contextmanager
def _explain_foreign_flags(arguments: Sequence[str]) -> Iterator[None]:
    """Context in which flags of other trainers, if there are any, explain an error."""
    try:
        yield
    except UserError:
        from config.unknown_flags import check_foreign_flags

        check_foreign_flags(arguments)
        raise


def _no_field_help(section: type[RunConfig]) -> FieldHelp:
    """Returns a function that makes no help text: most commands ask for none."""
    return lambda field: None


def _add_fields(
    groups: Mapping[str, argparse._ArgumentGroup],
    base: BaseConfig,
    get_field_help: Callable[[type[RunConfig]], FieldHelp],
) -> None:
    """Adds flags for the config fields of a model family; without a model, of all families."""
    section, known = base.settings.section, set[str]()
    others = [family.config for family in FAMILIES.values()] if base.is_unspecified else []
    for config_class in (section, *others):
        add_field_flags(groups, config_class, get_field_help(config_class), known)
        known |= {leaf.path for leaf in config_fields(config_class)}


def _merge_settings(
    base: BaseConfig, flags: Mapping[str, Any], loader: ConfigLoader | None
) -> LayeredConfig:
    """Returns the configuration merged from all sources; prints values that it replaces."""
    flags = with_absolute_paths(flags)
    notes = [*base.external_paths(flags), *base.differences(flags)]
    settings, more = drop_overridden_epochs(
        base.settings.with_sources(ConfigSource("flags", flags))
    )
    settings, most = fit_micro_batch_to_batch(settings)
    settings, others = resolve_contradictions(with_default_epochs_and_batch(settings))
    if loader is not None:
        folders = loader.resolve_addresses(settings.config.checkpoint)
        settings = settings.with_sources(ConfigSource("folders", nest_by_path(folders)))
        settings = _with_adapter(settings, base, flags, loader)
        if base.run is None:
            rows = loader.new_token_fields(settings)
            settings = (
                settings.with_sources(ConfigSource("new tokens", nest_by_path(rows)))
                if rows
                else settings
            )
        settings, of_adapter = resolve_contradictions(settings)
        settings, of_dropout = disable_preference_dropout(settings)
        others += [*of_adapter, *of_dropout]
    for note in (*notes, *more, *most, *others):
        say(note)
    return settings


def _with_adapter(
    settings: LayeredConfig, base: BaseConfig, flags: Mapping[str, Any], loader: ConfigLoader
) -> LayeredConfig:
    """Adds the config fields of the adapter in `adapter.load`, unless the run is resumed."""
    folder, given = settings.config.adapter.load, flags.get("adapter", {})
    if folder is None or (base.run is not None and "load" not in given):
        return settings
    fields = flatten_by_path(loader.from_adapter(folder, settings.config))
    by_flags = flatten_by_path(flags)
    for name in ("adapter.dropout", "data.tokenizer"):  # which its weights do not depend on
        if name in by_flags:
            fields.pop(name, None)
    for name in sorted(fields.keys() & by_flags.keys()):
        asked = flatten_by_path(settings.config.to_dict())[name]
        if asked != fields[name]:
            raise ConfigError(
                f"{name} is {format_name(fields[name])} in {format_path(folder)}, not "
                f"{format_name(asked)}: leave it out"
            )
    return settings.with_sources(ConfigSource(folder, nest_by_path(fields)))


def _format_default_config(preset: str, loader: ConfigLoader | None, takes_default: bool) -> str:
    """Returns the name, in the help text, of the configuration used without `--config`."""
    if loader is None:
        return preset
    if takes_default:
        return f"the run that --load names, else {preset}"
    return "the run that --save or --load names"


def format_command(script: str, arguments: Sequence[str] | None) -> str:
    """Returns a shell command line that starts a script with arguments.

    Args:
        script: its file.
        arguments: None: those of this process.
    """
    return shlex.join(
        ["python3", Path(script).name, *(sys.argv[1:] if arguments is None else arguments)]
    )
