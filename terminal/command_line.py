"""Reading a command line: a preset, a run or a model, and a flag for every field over it."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from config.base import Leaf, flattened, leaves, nested
from config.chosen import CHOSEN
from config.errors import ConfigError
from config.families import FAMILIES
from config.flags import (
    ALL_USED,
    Unused,
    add_field_flags,
    field_overrides,
    section_groups,
    spell_flags,
    with_search,
)
from config.flags_of_others import check_flags
from config.help import RARE, field_help, formatter
from config.layers import (
    EPOCHS,
    LAYOUT,
    Layer,
    Settings,
    with_fitting_micro_batch,
    with_length_and_batch,
    with_one_length,
    without_contradictions,
    without_dropout,
)
from config.presets import merge, placed, preset_names
from config.sections import RunConfig
from files.formatting import format_name, format_path
from terminal.below_flags import Below, Origins, below_flags
from terminal.file_options import AddOptions
from terminal.first_reading import FirstReading, add_config_options
from terminal.parser import Parser, add_process_options
from terminal.screen import say


@dataclass(frozen=True)
class CommandLine:
    """A parsed command line. Only scripts see it; they pass on its parts as typed values."""

    config: RunConfig
    """The preset with the flags over it."""

    preset: str
    """The preset's name, or the path of the file or run that was given instead."""

    options: argparse.Namespace
    """The values of the script's own options; each name with underscores."""

    settings: Settings
    """What `config` is made of. Where they are open, `planning.auto_config` completes them."""


def read_command_line(
    description: str | None,
    presets: str | Path,
    default_preset: str,
    arguments: Sequence[str] | None = None,
    add_options: AddOptions | None = None,
    origins: Origins | None = None,
    takes_default: bool = False,
    unused: Unused = ALL_USED,
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
        takes_default: run the default preset where nothing is named.
        unused: fields whose flags are refused.

    Raises:
        ConfigError: if anything given is unknown, ambiguous, or of the wrong type.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    check_flags(given)
    unused.check(given)
    first = FirstReading.of(given, presets, origins is not None, add_options)
    below = below_flags(first, presets, default_preset, origins, takes_default)
    section, data, is_open = below.settings.section, below.settings.given, below.settings.is_open
    parser = Parser(
        description=description,
        usage="%(prog)s [--config NAME] [--FIELD VALUE ...]",
        epilog=_epilog(below.name, presets, is_open),
        allow_abbrev=False,
        formatter_class=formatter,
    )
    default = _default(default_preset, origins, takes_default)
    add_config_options(parser, with_models=origins is not None, default=default)
    parser.add_argument("--help-all", action="help", help="show all fields, in full")
    groups = section_groups(parser)
    if add_options:
        add_options(parser)
    names = parser.names()
    add_process_options(parser)
    flags = parser.flags()
    all_fields = any(a.replace("_", "-") == "--help-all" for a in given)
    if not all_fields:
        parser.shorten(RARE)
    _add_fields(groups, below, partial(_field_help, below, str(presets), all_fields, unused))
    parsed = vars(parser.parse_args(spell_flags(first.arguments, section, flags)))
    settings = _settings(below, with_search(field_overrides(parsed, section), data), origins)
    return CommandLine(
        config=settings.config,
        preset=below.name,
        options=argparse.Namespace(**{name: parsed[name] for name in names if name in parsed}),
        settings=settings,
    )


HelpOf = Callable[[Leaf], str]


def _field_help(
    below: Below, presets: str, all_fields: bool, unused: Unused, section: type[RunConfig]
) -> HelpOf:
    """The help of a family's fields, with the values that are used."""
    settings, is_open = with_length_and_batch(below.settings), below.settings.is_open
    values = merge(settings.chosen, settings.given)
    replaced = [] if flattened(values).get(EPOCHS) is None else ["training.steps"]
    nowhere = [*replaced, *(["data.dataset"] if is_open else [])]
    nowhere += ["data.examples_per_sample"] if below.is_nothing else []  # families differ
    open_layout = LAYOUT if settings.shares_openly and presets == "finetuning" else ()
    chosen = CHOSEN if is_open else open_layout
    return field_help(section, values, presets, all_fields, chosen, unused, nowhere)


def _add_fields(
    groups: Mapping[str, argparse._ArgumentGroup],
    below: Below,
    help_of: Callable[[type[RunConfig]], HelpOf],
) -> None:
    """Flags of the family's fields; for help without a model, also those of other families."""
    section, known = below.settings.section, set[str]()
    others = [family.config for family in FAMILIES.values()] if below.is_nothing else []
    for config_class in (section, *others):
        add_field_flags(groups, config_class, help_of(config_class), known)
        known |= {leaf.dotted for leaf in leaves(config_class)}


def _settings(below: Below, flags: Mapping[str, Any], origins: Origins | None) -> Settings:
    """All layers. Says what replaces what where a person may not expect it."""
    flags = placed(flags)
    notes = [*below.places(flags), *below.differences(flags)]
    settings, more = with_one_length(below.settings.over(Layer("flags", flags)))
    settings, most = with_fitting_micro_batch(settings)
    settings, others = without_contradictions(with_length_and_batch(settings))
    if origins is not None:
        folders = origins.placed(settings.config.checkpoint)
        settings = settings.over(Layer("folders", nested(folders)))
        settings = _with_adapter(settings, below, flags, origins)
        if below.run is None:
            rows = origins.vocabulary(settings)
            settings = settings.over(Layer("new tokens", nested(rows))) if rows else settings
        settings, of_adapter = without_contradictions(settings)
        settings, of_dropout = without_dropout(settings)
        others += [*of_adapter, *of_dropout]
    for note in (*notes, *more, *most, *others):
        say(note)
    return settings


def _with_adapter(
    settings: Settings, below: Below, flags: Mapping[str, Any], origins: Origins
) -> Settings:
    """The settings of the adapter that is loaded, unless a run which began with it goes on."""
    folder, given = settings.config.adapter.load, flags.get("adapter", {})
    if folder is None or (below.run is not None and "load" not in given):
        return settings
    fields = flattened(origins.adapter(folder, settings.config))
    by_flags = flattened(flags)
    for name in ("adapter.dropout", "data.tokenizer"):  # which its weights do not depend on
        if name in by_flags:
            fields.pop(name, None)
    for name in sorted(fields.keys() & by_flags.keys()):
        asked = flattened(settings.config.to_dict())[name]
        if asked != fields[name]:
            raise ConfigError(
                f"{name} is {format_name(fields[name])} in {format_path(folder)}, not "
                f"{format_name(asked)}: leave it out"
            )
    return settings.over(Layer(folder, nested(fields)))


def _default(preset: str, origins: Origins | None, takes_default: bool) -> str:
    """Name the configuration that is used without `--config`, for the help."""
    if origins is None:
        return preset
    if takes_default:
        return f"the run that --load names, else {preset}"
    return "the run that --save or --load names"


def _epilog(preset: str, presets: str | Path, is_open: bool) -> str:
    """The end of a help text."""
    used = (
        "what is used where no flag says it; the program chooses by model, data and machine"
        if is_open
        else f"the values of {preset}"
    )
    names = ", ".join(preset_names(presets))
    return f"In brackets: {used}. Presets for --config (pods: Graphcore's layouts): {names}"


def typed(script: str, arguments: Sequence[str] | None) -> str:
    """A command in the form in which it can be typed again.

    Args:
        script: its file.
        arguments: None: those of this process.
    """
    return shlex.join(
        ["python3", Path(script).name, *(sys.argv[1:] if arguments is None else arguments)]
    )
