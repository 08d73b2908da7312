"""Command-line flags: one for each configuration field.

A field answers to its dotted name, such as `--training.optimizer.learning_rate.maximum`, and the
most used ones to an alias. Dashes and underscores are equal. Aliases are listed, not derived, so
that a new field cannot change what an old command means.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from config.base import ConfigField, ConfigSection, config_fields
from config.errors import ConfigError, find_similar_names
from config.run import SEARCH_FIELDS
from files.formatting import format_name

ALIASES = {
    "load": "checkpoint.load",
    "save": "checkpoint.save",
    "to_keep": "checkpoint.to_keep",
    "dataset": "data.dataset",
    "tokenizer": "data.tokenizer",
    "source_language": "data.source_language",
    "target_language": "data.target_language",
    "examples_per_sample": "data.examples_per_sample",
    "steps": "training.steps",
    "epochs": "training.epochs",
    "global_batch_size": "training.global_batch_size",
    "learning_rate": "training.optimizer.learning_rate.maximum",
    "warmup_steps": "training.optimizer.learning_rate.warmup_steps",
    "warmup_proportion": "training.optimizer.learning_rate.warmup_proportion",
    "stochastic_rounding": "training.stochastic_rounding",
    "max_skipped_steps": "training.max_skipped_steps",
    "master_weights": "execution.master_weights",
    "micro_batch_size": "execution.micro_batch_size",
    "data_parallel": "execution.data_parallel",
    "tensor_parallel": "execution.tensor_parallel",
    "device_iterations": "execution.device_iterations",
    "device": "execution.device",
    "activations": "execution.activations",
    "resident_layers": "execution.resident_layers",
    "attention_serialisation": "execution.attention_serialisation",
    "loss_scaling": "execution.loss_scaling",
    "layers": "model.layers",
    "num_hidden_layers": "model.num_hidden_layers",
    "hidden_size": "model.hidden_size",
    "d_ff": "model.d_ff",
    "heads": "model.attention.heads",
    "num_attention_heads": "model.num_attention_heads",
    "d_kv": "model.attention.d_kv",
    "vocab_size": "model.embedding.vocab_size",
    "sequence_length": "model.sequence_length",
    "decoder_sequence_length": "model.decoder_sequence_length",
    "output_length": "model.output_length",
    "precision": "model.precision",
    "dropout_prob": "model.dropout_prob",
    "quantization": "model.quantization",
    "scale_ff": "model.scale_ff",
    "seed": "model.seed",
    "search": "generation.search",
    "temperature": "generation.temperature",
    "top_k": "generation.top_k",
    "top_p": "generation.top_p",
    "num_beams": "generation.num_beams",
    "repetition_penalty": "generation.repetition_penalty",
    "no_repeat_ngram_size": "generation.no_repeat_ngram_size",
    "stop_strings": "generation.stop_strings",
}
"""Short flags, permanent: lines may be added here, but not changed."""


@dataclass(frozen=True)
class UnusedFields:
    """Configuration fields that a script does not use and whose flags it refuses.

    Attributes:
        names: dotted names of fields, or of whole sections.
        used: fields of these sections that it does use.
        reason: why, the end of a sentence.
    """

    names: tuple[str, ...] = ()
    used: tuple[str, ...] = ()
    reason: str = ""

    def __contains__(self, field: object) -> bool:
        name = str(field)
        return _is_within_any(name, self.names) and not _is_within_any(name, self.used)

    def check_arguments(self, arguments: Iterable[str]) -> None:
        """Raises ConfigError if a command line has flags of unused fields."""
        flags = [a.partition("=")[0] for a in arguments if a.startswith("--")]
        spelled = {flag: flag.lstrip("-").replace("-", "_") for flag in flags}
        refused = [flag for flag, name in spelled.items() if ALIASES.get(name, name) in self]
        if refused:
            raise ConfigError(f"{', '.join(refused)}: not used here, since {self.reason}; leave "
                              f"{'it' if len(refused) == 1 else 'them'} out")  # fmt: skip


ALL_USED = UnusedFields()


def _is_within_any(field: str, names: Iterable[str]) -> bool:
    return any(f"{field}.".startswith(f"{name}.") for name in names)


GROUPS = {
    "data": "the data",
    "checkpoint": "weights and checkpoints",
    "training": "training",
    "adapter": "adapters",
    "eval": "evaluation",
    "generation": "generation",
    "family": "the family",
    "model": "the model",
    "execution": "devices and memory",
    "fp8": "FP8",
}
"""Headings of the sections in `--help`, in its order."""

FieldHelp = Callable[[ConfigField], str | None]
"""Makes the help text of a field."""

_FLAG = re.compile(r"--\w")
_SHORT = {dotted: alias for alias, dotted in ALIASES.items()}


def shortest_flag(field_path: str) -> str:
    """Returns the shortest flag of a field, without dashes: its alias or its dotted path."""
    return _SHORT.get(field_path, field_path)


def add_section_groups(parser: argparse.ArgumentParser) -> dict[str, argparse._ArgumentGroup]:
    """Adds an argument group to the parser for each config section."""
    return {section: parser.add_argument_group(title) for section, title in GROUPS.items()}


def add_field_flags(
    groups: Mapping[str, argparse._ArgumentGroup],
    config_class: type[ConfigSection],
    get_help_text: FieldHelp,
    existing_flags: Container[str] = (),
) -> None:
    """Adds a flag for each configuration field to the argument group of its section.

    The texts given for a field are found in the parsed namespace under its dotted name.

    Args:
        groups: see `add_section_groups`.
        get_help_text: returns the help of a field; `argparse.SUPPRESS` leaves the flag out.
        existing_flags: dotted names of fields that have a flag already.
    """
    for leaf in config_fields(config_class):
        if leaf.path in existing_flags:
            continue
        section = leaf.path.partition(".")[0]
        groups[section].add_argument(
            f"--{shortest_flag(leaf.path)}",
            dest=leaf.path,
            default=argparse.SUPPRESS,
            metavar=leaf.type.help_placeholder(),
            help=get_help_text(leaf),
            # A bare `--flag` switches a boolean on; names may be words of their own.
            nargs="?" if leaf.type.kind is bool else "+" if leaf.type.is_list else None,
            const="true" if leaf.type.kind is bool else None,
        )


def normalize_flag_spelling(
    arguments: Sequence[str], config_class: type[ConfigSection], options: Iterable[str]
) -> list[str]:
    """Returns command-line arguments with each flag in the spelling that the parser knows.

    Args:
        arguments: the command line.
        config_class: the root section.
        options: the flags that are no fields, such as `--wandb-name`.

    Raises:
        ConfigError: for an unknown flag.
    """
    fields = [leaf.path for leaf in config_fields(config_class)]
    known = {option.lstrip("-").replace("-", "_"): option for option in options}
    known |= {field: f"--{shortest_flag(field)}" for field in fields}
    known |= {alias: f"--{alias}" for alias, field in ALIASES.items() if field in fields}
    spelled = []
    for argument in arguments:
        if _FLAG.match(argument) is None:
            spelled.append(argument)
            continue
        name, equals, value = argument[2:].partition("=")
        key = name.replace("-", "_")
        if key not in known:
            raise _unknown_flag_error(key, known, fields)
        spelled.append(known[key] + equals + value)
    return spelled


def parse_field_overrides(
    parsed_arguments: Mapping[str, str], config_class: type[ConfigSection]
) -> dict[str, Any]:
    """Returns the field values set on the command line, nested and parsed by type.

    Args:
        parsed_arguments: texts by dotted field name; other names are ignored.
        config_class: the root section.

    Raises:
        ConfigError: for a text that the field cannot have.
    """
    nested: dict[str, Any] = {}
    for leaf in config_fields(config_class):
        if leaf.path not in parsed_arguments:
            continue
        *sections, name = leaf.path.split(".")
        target = nested
        for section in sections:
            target = target.setdefault(section, {})
        text = parsed_arguments[leaf.path]
        if isinstance(text, list) and text:
            text = ",".join(text)
        if not isinstance(text, str):  # argparse takes the value `--` away
            text = "--"
        try:
            target[name] = leaf.type.parse(text, leaf.path)
        except ValueError as error:
            raise ConfigError(str(error)) from None
    return nested


def infer_search_strategy(
    overrides: Mapping[str, Any], base_values: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Sets the generation strategy to which the given generation settings belong.

    Args:
        base_values: the values that they override.

    Raises:
        ConfigError: a setting would have no effect, since it belongs to another search.
    """
    given = overrides.get("generation", {})
    for search, names in SEARCH_FIELDS.items():
        own = [name for name in names if name in given]
        if not own:
            continue
        chosen = given.get("search") or base_values.get("generation", {}).get("search", "greedy")
        if "search" not in given and chosen == "greedy":
            given = {**given, "search": search}
        elif chosen != search:
            raise ConfigError(
                f"generation.{own[0]} belongs to the search {search}, but generation.search is "
                f"{chosen}: give --search {search}, or leave it out"
            )
    return {**overrides, "generation": given} if given else overrides


def _unknown_flag_error(
    name: str, known_flags: Mapping[str, str], fields: Sequence[str]
) -> ConfigError:
    """Returns the error for an unknown flag, with similar flags as advice.

    Args:
        known_flags: the flag of each name that is understood.
    """
    inside = [f"--{shortest_flag(field)}" for field in fields if f".{name}." in f".{field}"]
    if inside:
        return ConfigError(f"--{name} is a section; set a field of it: {_join_with_or(inside)}")
    ends = f".{name}", f"_{name}"
    ending = next(filter(None, ([f for f in fields if f.endswith(end)] for end in ends)), [])
    close = [known_flags[field] for field in ending] or [
        known_flags[n] for n in find_similar_names(name, known_flags)
    ]
    hint = f"did you mean {_join_with_or(close)}?" if close else "--help-all lists all of them"
    return ConfigError(f"unknown option --{format_name(name)}; {hint}")


def _join_with_or(flags: Iterable[str]) -> str:
    return " or ".join(dict.fromkeys(flags))
