"""Help texts of a command line, which only `--help` and `--help-all` need."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from config.base import flatten_by_path
from config.config_sources import AUTO_FIELDS, EPOCHS, LAYOUT, with_default_epochs_and_batch
from config.flags import FieldHelp, UnusedFields
from config.help import RARE, make_field_help, make_help_formatter
from config.presets import merge_over, preset_names
from config.sections import RunConfig
from terminal.base_config import BaseConfig
from terminal.parser import Parser


def add_help_texts(
    parser: Parser, base: BaseConfig, presets: str, all_fields: bool, unused: UnusedFields
) -> Callable[[type[RunConfig]], FieldHelp]:
    """Completes a parser for `--help`; returns what makes the help texts of a section's fields.

    Args:
        all_fields: True for `--help-all`.
    """
    parser.epilog = _help_epilog(base, presets, all_fields)
    parser.formatter_class = make_help_formatter
    if not all_fields:
        parser.hide_options(RARE)
    return partial(_make_field_help, base, presets, all_fields, unused)


def _make_field_help(
    base: BaseConfig, presets: str, all_fields: bool, unused: UnusedFields, section: type[RunConfig]
) -> FieldHelp:
    """Returns the function that makes a field's help text, with its effective default."""
    settings = with_default_epochs_and_batch(base.settings)
    has_auto_fields = base.settings.has_auto_fields
    values = merge_over(settings.auto_values, settings.explicit_values)
    replaced = [] if flatten_by_path(values).get(EPOCHS) is None else ["training.steps"]
    nowhere = [*replaced, *(["data.dataset"] if has_auto_fields else [])]
    nowhere += ["data.examples_per_sample"] if base.is_unspecified else []  # families differ
    open_layout = LAYOUT if settings.planner_chooses_layout and presets == "finetuning" else ()
    chosen = AUTO_FIELDS if has_auto_fields else open_layout
    return make_field_help(section, values, presets, all_fields, chosen, unused, nowhere)


def _help_epilog(base: BaseConfig, presets: str, lists_all_presets: bool) -> str:
    """Returns the last paragraph of the help text, which lists all presets or the smallest ones."""
    used = (
        "what is used where no flag says it; the program chooses by model, data and machine"
        if base.settings.has_auto_fields
        else f"the values of {base.name}"
    )
    names = preset_names(presets)
    if lists_all_presets:
        listed = f"Presets for --config (pods: Graphcore's layouts): {', '.join(names)}"
    else:
        smallest = ", ".join(name for name in names if name.endswith("tiny"))
        listed = f"The smallest presets for --config ({len(names)} in --help-all): {smallest}"
    return f"In brackets: {used}. {listed}"
