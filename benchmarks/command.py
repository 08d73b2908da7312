"""The command line of a benchmark of one configured model."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from config.base import flattened
from config.errors import ConfigError
from config.flags import Unused
from config.sections import RunConfig
from machine.shortage import explain_shortages
from planning.options import (
    NeedsOf,
    add_devices_option,
    add_plan_options,
    planned,
    planned_machine,
)
from planning.origins import ORIGINS
from terminal.command_line import CommandLine, read_command_line
from terminal.parser import count_option
from terminal.screen import is_first_process

DEFAULTS = {"finetuning_mnli.py": "gptj_6B_1024_pod64"}
"""The preset of a script that is called so; of others it is that of FLAN-T5's document."""


def run_benchmark(
    name: str,
    doc: str | None,
    arguments: Sequence[str] | None,
    measure: Callable[[RunConfig, int], Any],
    summary: Callable[[Any], str],
    needs_of: NeedsOf,
    unused: Unused,
) -> None:
    """Measure the configuration of a command line; print a line for people and one of JSON.

    With an option for plans, show the plan instead. `--load` of a run takes its configuration.

    Args:
        name: of the benchmark and its file of presets.
        measure: `measure(config, runs)` returns a dataclass, with a `MachineUse` as `machine`.
        summary: one line of it.
        needs_of: what the program of a configuration needs.
        unused: fields that `measure` has no use for.
    """
    options = _add_options_of_training if name == "finetuning" else _add_options
    line = read_benchmark_line(name, doc, arguments, unused, options)
    if planned(line, needs_of):
        return
    with explain_shortages(line.preset, line.config):
        measured = measure(line.config, line.options.runs)
    if not is_first_process():
        return
    print(summary(measured))
    facts = {"benchmark": name, "config": line.preset, **asdict(measured)}
    facts |= facts.pop("machine")
    print(json.dumps(facts | asdict(line.config.execution)))


def read_benchmark_line(
    presets: str,
    doc: str | None,
    arguments: Sequence[str] | None,
    unused: Unused,
    add_options: Callable[[argparse.ArgumentParser], None] | None = None,
) -> CommandLine:
    """Read the command line of a benchmark, whose data are generated.

    Args:
        presets: "finetuning" or "inference".

    Raises:
        ConfigError: a preset and `--load` both say what is measured.
    """
    default = DEFAULTS.get(Path(sys.argv[0]).name, "xxl_pod64")
    line = read_command_line(
        (doc or "").partition("\n")[0],
        presets,
        default,
        arguments,
        add_options,
        ORIGINS,
        takes_default=True,
        unused=unused,
    )
    if line.options.config is not None and _is_given(line, "checkpoint.load"):
        raise ConfigError(
            "--load: not used beside --config, which says what is measured; leave one of them out"
        )
    trains, options = presets == "finetuning", line.options
    if line.settings.is_open or (trains and line.settings.shares_openly):
        from planning.choices import with_choices  # takes seconds to import

        target = planned_machine(line) if hasattr(options, "machine") else None
        count = getattr(options, "devices", None)
        line = with_choices(line, trains=trains, machine=target, count=count)
    return line


def _is_given(line: CommandLine, field: str) -> bool:
    """Whether a flag gives a field a value."""
    flags = (layer for layer in line.settings.layers if layer.name == "flags")
    return any(field in flattened(layer.values) for layer in flags)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=count_option, default=5, help="measured runs of the program")
    add_plan_options(parser)


def _add_options_of_training(parser: argparse.ArgumentParser) -> None:
    _add_options(parser)
    add_devices_option(parser)
