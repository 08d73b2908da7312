"""Command line and report of the speed measurements `finetuning.py` and `inference.py`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import popxl
from config.errors import ConfigError
from config.flags import UnusedFields
from config.sections import RunConfig
from modelling.devices import resolve_device_desc
from planning.config_loader import CONFIG_LOADER
from planning.hardware.matrix_rate import measure_matmul_rate
from planning.hardware.resource_errors import explain_resource_errors
from planning.plan_options import (
    RequirementsFn,
    add_devices_option,
    add_plan_options,
    plan_machine,
    show_plan,
)
from planning.requirements import Requirements
from run.records.throughput import peak_host_bytes
from terminal.command_line import CommandLine, read_command_line
from terminal.parser import parse_count_option
from terminal.screen import is_first_process

DEFAULTS = {"finetuning_mnli.py": "gptj_6B_1024_pod64"}
"""Default preset by script; other scripts have FLAN-T5's, xxl_pod64."""


def report_throughput(
    name: str,
    doc: str | None,
    arguments: Sequence[str] | None,
    measure: Callable[[RunConfig, int], Any],
    summary: Callable[[Any], str],
    requirements_fn: RequirementsFn,
    unused: UnusedFields,
) -> None:
    """Measure the speed of a configuration; prints a summary line and a JSON line.

    With an option for plans, show the plan instead. `--load` of a run takes its configuration.

    Args:
        name: "finetuning" or "inference", the script and its file of presets.
        measure: `measure(config, runs)` returns a dataclass, with a `FlopsUtilization` as
            `machine`.
        summary: formats that dataclass as one line.
        requirements_fn: computes memory and work of the program of a configuration.
        unused: fields that `measure` ignores.
    """
    options = _add_options_of_training if name == "finetuning" else _add_options
    line = read_throughput_line(name, doc, arguments, unused, options)
    if show_plan(line, requirements_fn):
        return
    with explain_resource_errors(line.preset, line.config):
        measured = measure(line.config, line.options.runs)
    if not is_first_process():
        return
    print(summary(measured))
    record = {"benchmark": name, "config": line.preset, **asdict(measured)}
    record |= record.pop("machine")
    print(json.dumps(record | asdict(line.config.execution)))


def read_throughput_line(
    presets: str,
    doc: str | None,
    arguments: Sequence[str] | None,
    unused: UnusedFields,
    add_options: Callable[[argparse.ArgumentParser], None] | None = None,
) -> CommandLine:
    """Read the command line of a script that runs on generated data.

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
        CONFIG_LOADER,
        takes_default=True,
        unused=unused,
    )
    if line.options.config is not None and line.settings.is_set_by_flag("checkpoint.load"):
        raise ConfigError(
            "--load: not used beside --config, which says what is measured; leave one of them out"
        )
    trains, options = presets == "finetuning", line.options
    if line.settings.needs_auto_values(trains):
        from planning.auto_config import resolve_auto_fields  # takes seconds to import

        target = plan_machine(line) if hasattr(options, "machine") else None
        count = getattr(options, "devices", None)
        line = resolve_auto_fields(line, trains=trains, machine=target, count=count)
    return line


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--runs", type=parse_count_option, default=5, help="measured runs of the program"
    )
    add_plan_options(parser)


def _add_options_of_training(parser: argparse.ArgumentParser) -> None:
    _add_options(parser)
    add_devices_option(parser)


@dataclass(frozen=True)
class FlopsUtilization:
    """Model FLOP/s of a measured program, as a fraction of the machine's matmul FLOP/s.

    Attributes:
        model_flops_per_second: FLOP/s of the model's matrix products on all devices together,
            without recomputation; a multiply-add counts as two.
        of_matrix_rate: this as a fraction of the measured rate of large matrix products of the
            model's dtype on the same devices.
        peak_host_bytes: peak memory of this process so far; None on Windows.
    """

    model_flops_per_second: float
    of_matrix_rate: float
    peak_host_bytes: int | None

    @classmethod
    def measure(
        cls,
        config: RunConfig,
        requirements_fn: Callable[[RunConfig], Requirements],
        samples_per_second: float,
    ) -> FlopsUtilization:
        """Measure matmul FLOP/s for a second, and compare a program's model FLOP/s with it."""
        peak = peak_host_bytes()
        execution = replace(
            config.execution, activations="keep", attention_serialisation=1, attention="scores"
        )
        requirements = requirements_fn(replace(config, execution=execution))
        flops = requirements.flops_per_sample * samples_per_second
        dtype = popxl.dtype.from_name(config.model.precision)
        rate = measure_matmul_rate(resolve_device_desc(config), dtype, config.num_replicas)
        return cls(flops, flops / rate, peak)
