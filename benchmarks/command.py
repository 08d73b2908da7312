"""The command line of a benchmark of one configured model."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from config.sections import RunConfig
from machine.shortage import explain_shortages
from planning.options import NeedsOf, add_plan_options, planned
from terminal.command_line import read_command_line
from terminal.parser import count_option
from terminal.screen import is_first_process


def run_benchmark(
    name: str,
    doc: str | None,
    arguments: Sequence[str] | None,
    measure: Callable[[RunConfig, int], Any],
    summary: Callable[[Any], str],
    needs_of: NeedsOf,
) -> None:
    """Measure the configuration of a command line; print a line for people and one of JSON.

    With an option for plans, show the plan instead.

    Args:
        name: of the benchmark and its file of presets.
        measure: `measure(config, runs)` returns a dataclass, with a `MachineUse` as `machine`.
        summary: one line of it.
        needs_of: what the program of a configuration needs.
    """
    description = (doc or "").partition("\n")[0]
    line = read_command_line(description, name, "xxl_pod64", arguments, _add_options)
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


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=count_option, default=5, help="measured runs of the program")
    add_plan_options(parser)
