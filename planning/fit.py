"""Print the configuration that trains a model fastest on a machine, and the time that it takes.

    python3 -m planning.fit google/flan-t5-xl
    python3 -m planning.fit Qwen/Qwen3-32B --machine h200 --devices 8 --tokens 1e9

Takes a preset, a Hugging Face folder, its config.json or a model of the hub, and any field of the
configuration as a flag. Without `--machine` it is the local machine, whose disk is measured if
`--execution.disk` names a folder.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import popxl
from config.errors import ConfigError
from config.presets import load_preset, preset_names
from files.formatting import format_path
from planning.config_loader import CONFIG_LOADER
from planning.hardware.machines import Machine, machine, machines
from planning.hardware.resource_errors import explain_resource_errors
from planning.plan_options import add_devices_option
from planning.report import PlanReport
from planning.report_text import format_batch_advice, format_bytes, format_setting_advice
from terminal.command_line import CommandLine, read_command_line
from terminal.entry_point import entry_point


@entry_point(single_process=True)
def main(arguments: Sequence[str] | None = None) -> None:
    """Plan training and generation of a model on a machine, and print both plans."""
    line = _read_fit_line(list(sys.argv[1:] if arguments is None else arguments))
    from planning.auto_config import resolve_auto_fields
    from planning.fit_search import plan_best_training, plan_generation
    from planning.hardware.local_machine import measure_local_machine
    from planning.program_variants import VariantCache
    from planning.speed_advice import with_speed_advice

    config, options = line.config, line.options
    with explain_resource_errors(line.preset, config):
        target = (
            machine(options.machine)
            if options.machine
            else measure_local_machine(config, config.execution.disk)
        )
        programs, count = VariantCache(), options.devices
        line = resolve_auto_fields(
            line, trains=True, machine=target, count=count, programs=programs
        )
        config = line.config
        report = plan_best_training(line.preset, [config], target, programs)
        report = with_speed_advice(report, programs, line.settings.has_explicit_layout)
        generation = plan_generation(line.preset, config, target)
    print("\n".join(format_fit(report, options.tokens)))
    print("\n".join(format_generation(generation)))


def _read_fit_line(arguments: list[str]) -> CommandLine:
    """Parse the command line of this script, whose first argument is a model or a preset."""
    if arguments and not arguments[0].startswith("-"):
        arguments = [*_model_options(arguments[0]), *arguments[1:]]
    elif not {"-h", "--help", "--help-all"} & set(arguments):
        raise ConfigError(
            "name a model first: python3 -m planning.fit MODEL, a preset, a Hugging Face folder, "
            "a config.json or a model of the hub"
        )
    return read_command_line(
        (__doc__ or "").partition("\n")[0],
        "finetuning",
        "xl_gpu",
        arguments,
        _add_options,
        CONFIG_LOADER,
    )


def _model_options(model: str) -> list[str]:
    """Return the training options that select a model."""
    path = Path(model)
    if model in preset_names("finetuning") or path.suffix in (".yml", ".yaml"):
        return ["--config", model]
    if path.suffix == ".json":
        if path.name != "config.json":
            raise ConfigError(f"{format_path(model)} must be called config.json")
        return ["--model", str(path.parent)]
    preset = None if path.exists() else _preset_for(model)
    return ["--config", preset] if preset else ["--model", model]


def _preset_for(model: str) -> str | None:
    """Return the preset that trains a published model on one device; None if there is none."""
    for name in preset_names("finetuning"):
        data = load_preset("finetuning", name)
        execution = data.get("execution", {})
        devices = execution.get("data_parallel", 1) * execution.get("tensor_parallel", 1)
        if data.get("checkpoint", {}).get("load") == model and devices == 1:
            return name
    return None


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--machine",
        metavar="NAME",
        help=f"{', '.join(machines())}, or a YAML file with the fields of "
        "planning/hardware/machines.yml (default: the local machine)",
    )
    add_devices_option(parser)
    parser.add_argument(
        "--tokens",
        type=_parse_tokens,
        metavar="N",
        default=1e9,
        help="tokens to train on, such as 5e8 (default: %(default)g)",
    )


def _parse_tokens(text: str) -> float:
    """Parse a number of tokens such as "1e9"."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 1 <= number < 1e18:
        raise argparse.ArgumentTypeError("must be a number of tokens, such as 1e9")
    return number


# ---- output -------------------------------------------------------------------------------------
def format_fit(report: PlanReport, tokens: float) -> list[str]:
    """Format a training plan as lines of text, with the time to train on `tokens` tokens."""
    requirements, c = report.requirements, report.requirements.config
    e = c.execution
    lines = [
        f"{report.preset}: {requirements.parameters / 1e6:,.1f} M parameters in "
        f"{c.model.precision}, {c.training.optimizer.name}",
        f"machine     {_format_machine(report.machine)}",
        f"fits        {_format_fits(report)}",
        f"devices     {c.num_replicas} = {e.data_parallel} data parallel × "
        f"{e.tensor_parallel} tensor parallel, micro-batches of {e.micro_batch_size}",
        *(f"{name:12}{_format_share(*share)}" for name, share in _memory_lines(report)),
    ]
    if requirements.placement is not None:
        lines.append(
            "placement   on each device, all the time: "
            f"{_format_resident_bytes(requirements.placement)}"
        )
    faster = [f"faster      {text}" for text in format_setting_advice(report)]
    if not report.fits:
        return [*lines, *faster]
    batch = c.training.global_batch_size
    hours = tokens / report.tokens_per_second / 3600
    return [
        *lines,
        f"step        {report.expected_seconds:,.2f} s for {batch} samples of up to "
        f"{requirements.tokens // requirements.samples} tokens: "
        f"{report.tokens_per_second:,.0f} tokens/s{_format_transfer_waits(report)}",
        *(f"small batch {text}" for text in [format_batch_advice(report)] if text),
        *faster,
        f"training    {tokens:,.0f} tokens take {_format_duration(hours)}",
    ]


def format_generation(report: PlanReport) -> list[str]:
    """Format the plan of generation on one device as lines of text."""
    if not report.fits:
        return ["generation  does not fit one device"]
    where = "layer by layer" if report.requirements.streamed else "weights on the device"
    memory = ", ".join(
        f"{format_bytes(needed)} {name}"
        for name, (needed, _) in report.memory_use.items()
        if needed
    )
    return [
        f"generation  on one device, {where}: {memory}; {report.tokens_per_second:,.0f} tokens/s "
        f"for {report.requirements.samples} prompts at once"
    ]


def _format_resident_bytes(placement: popxl.plan.Placement) -> str:
    """Format the bytes of state that stays on the device: the four largest kinds of state."""
    sums: Counter[str] = Counter()
    for kind in placement.kinds:
        sums[kind.label.removesuffix(" that many layers read")] += kind.nbytes
    largest = sums.most_common(4)
    largest += [("others", sums.total() - sum(n for _, n in largest))]
    return ", ".join(f"{n / 1e9:.1f} GB of {what}" for what, n in largest if n >= 1e8) or "nothing"


def _format_machine(target: Machine) -> str:
    devices = "" if target.platform == "cpu" else f" of {format_bytes(target.memory)}"
    return (
        f"{target.title}{devices}, {format_bytes(target.host_memory)} host memory, "
        f"{format_bytes(target.disk)} disk at {target.disk_read / 1e9:.1f} GB/s read and "
        f"{target.disk_write / 1e9:.1f} GB/s write"
    )


def _format_fits(report: PlanReport) -> str:
    if report.fits:
        folder = report.requirements.config.execution.disk
        return f"yes, with --execution.disk {folder}" if report.plan.disk else "yes"
    lacking = [
        name for name, (needed, available) in report.memory_use.items() if needed > available
    ]
    return f"NO: not enough {' and '.join(lacking)}"


def _memory_lines(report: PlanReport) -> list[tuple[str, tuple[float, float]]]:
    short = {"device memory": "device", "host memory": "host", "memory": "memory"}
    return [(short.get(name, name), share) for name, share in report.memory_use.items()]


def _format_share(needed: float, available: float) -> str:
    return f"{format_bytes(needed)} of {format_bytes(available)}"


def _format_transfer_waits(report: PlanReport) -> str:
    timeline = report.timeline
    if timeline is None or not timeline.seconds:
        return ""
    return f"; {timeline.exposed_transfers / timeline.seconds:.0%} of it waiting for transfers"


def _format_duration(hours: float) -> str:
    return f"{hours:,.1f} hours" if hours < 100 else f"{hours / 24:,.1f} days"


if __name__ == "__main__":
    sys.exit(main())
