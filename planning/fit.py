"""Whether a model can be trained on a machine, how, and how long it takes.

    python3 -m planning.fit google/flan-t5-xl
    python3 -m planning.fit Qwen/Qwen3-32B --machine h200 --devices 8 --tokens 1e9

Takes a preset, a Hugging Face folder, its config.json or a model of the hub, and any field of the
configuration as a flag. Without `--machine` it is the one at hand, whose disk is measured where
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
from config.presets import preset_data, preset_names
from files.formatting import format_path
from planning.hardware.machines import Machine, machine, machines
from planning.hardware.resource_errors import explain_resource_errors
from planning.origins import ORIGINS
from planning.plan_options import add_devices_option
from planning.report import Report
from planning.report_text import faster_state, format_bytes, larger_batch
from terminal.command_line import CommandLine, read_command_line
from terminal.entry_point import entry_point


@entry_point(alone=True)
def main(arguments: Sequence[str] | None = None) -> None:
    """Plan and print."""
    line = _read(list(sys.argv[1:] if arguments is None else arguments))
    from planning.advice import with_advice
    from planning.auto_config import resolve_auto_fields
    from planning.fit_search import plan_best_training, plan_generation
    from planning.hardware.local_machine import measure_local_machine
    from planning.program_variants import VariantCache

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
        made = plan_best_training(line.preset, [config], target, programs)
        made = with_advice(made, programs, line.settings.is_layout_told)
        written = plan_generation(line.preset, config, target)
    print("\n".join(format_fit(made, options.tokens)))
    print("\n".join(format_generation(written)))


def _read(arguments: list[str]) -> CommandLine:
    """A command line whose first word is the model."""
    if arguments and not arguments[0].startswith("-"):
        arguments = [*_named(arguments[0]), *arguments[1:]]
    elif not {"-h", "--help", "--help-all"} & set(arguments):
        raise ConfigError(
            "name a model first: python3 -m planning.fit MODEL, a preset, a Hugging Face folder, "
            "a config.json or a model of the hub"
        )
    return read_command_line(
        (__doc__ or "").partition("\n")[0], "finetuning", "xl_gpu", arguments, _add_options, ORIGINS
    )


def _named(model: str) -> list[str]:
    """How the command line of training names a model."""
    path = Path(model)
    if model in preset_names("finetuning") or path.suffix in (".yml", ".yaml"):
        return ["--config", model]
    if path.suffix == ".json":
        if path.name != "config.json":
            raise ConfigError(f"{format_path(model)} must be called config.json")
        return ["--model", str(path.parent)]
    preset = None if path.exists() else _published(model)
    return ["--config", preset] if preset else ["--model", model]


def _published(model: str) -> str | None:
    """The preset that trains a published model on one device; None if there is none."""
    for name in preset_names("finetuning"):
        data = preset_data("finetuning", name)
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
        "planning/hardware/machines.yml (default: the machine at hand)",
    )
    add_devices_option(parser)
    parser.add_argument(
        "--tokens",
        type=_tokens,
        metavar="N",
        default=1e9,
        help="tokens to train on, such as 5e8 (default: %(default)g)",
    )


def _tokens(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 1 <= number < 1e18:
        raise argparse.ArgumentTypeError("must be a number of tokens, such as 1e9")
    return number


# ---- the screen ---------------------------------------------------------------------------------
def format_fit(made: Report, tokens: float) -> list[str]:
    """What training needs, as lines for people."""
    requirements, c = made.requirements, made.requirements.config
    e = c.execution
    lines = [
        f"{made.preset}: {requirements.parameters / 1e6:,.1f} M parameters in {c.model.precision}, "
        f"{c.training.optimizer.name}",
        f"machine     {_machine(made.machine)}",
        f"fits        {_fits(made)}",
        f"devices     {c.replicas} = {e.data_parallel} data parallel × {e.tensor_parallel} tensor "
        f"parallel, micro-batches of {e.micro_batch_size}",
        *(f"{name:12}{_share(*share)}" for name, share in _memory_lines(made)),
    ]
    if requirements.placement is not None:
        lines.append(f"placement   on each device, all the time: {_kept(requirements.placement)}")
    state = [f"state       {text}" for text in [faster_state(made)] if text]
    if not made.fits:
        return [*lines, *state]
    batch = c.training.global_batch_size
    hours = tokens / made.tokens_per_second / 3600
    return [
        *lines,
        f"step        {made.expected_seconds:,.2f} s for {batch} samples of up to "
        f"{requirements.tokens // requirements.samples} tokens: "
        f"{made.tokens_per_second:,.0f} tokens/s{_waits(made)}",
        *(f"small batch {text}" for text in [larger_batch(made)] if text),
        *state,
        f"training    {tokens:,.0f} tokens take {_duration(hours)}",
    ]


def format_generation(made: Report) -> list[str]:
    """What generation on one device needs."""
    if not made.fits:
        return ["generation  does not fit one device"]
    where = "layer by layer" if made.requirements.streamed else "weights on the device"
    memory = ", ".join(
        f"{format_bytes(needed)} {name}" for name, (needed, _) in made.memory_use.items() if needed
    )
    return [
        f"generation  on one device, {where}: {memory}; {made.tokens_per_second:,.0f} tokens/s for "
        f"{made.requirements.samples} prompts at once"
    ]


def _kept(placement: popxl.plan.Placement) -> str:
    """The four largest kinds of entries that stay on the device, and how much of the others."""
    sums: Counter[str] = Counter()
    for kind in placement.kinds:
        sums[kind.label.removesuffix(" that many layers read")] += kind.nbytes
    largest = sums.most_common(4)
    largest += [("others", sums.total() - sum(n for _, n in largest))]
    return ", ".join(f"{n / 1e9:.1f} GB of {what}" for what, n in largest if n >= 1e8) or "nothing"


def _machine(on: Machine) -> str:
    devices = "" if on.platform == "cpu" else f" of {format_bytes(on.memory)}"
    return (
        f"{on.title}{devices}, {format_bytes(on.host_memory)} host memory, "
        f"{format_bytes(on.disk)} disk at {on.disk_read / 1e9:.1f} GB/s read and "
        f"{on.disk_write / 1e9:.1f} GB/s write"
    )


def _fits(made: Report) -> str:
    if made.fits:
        folder = made.requirements.config.execution.disk
        return f"yes, with --execution.disk {folder}" if made.plan.disk else "yes"
    lacking = [name for name, (needed, there) in made.memory_use.items() if needed > there]
    return f"NO: not enough {' and '.join(lacking)}"


def _memory_lines(made: Report) -> list[tuple[str, tuple[float, float]]]:
    short = {"device memory": "device", "host memory": "host", "memory": "memory"}
    return [(short.get(name, name), share) for name, share in made.memory_use.items()]


def _share(needed: float, there: float) -> str:
    return f"{format_bytes(needed)} of {format_bytes(there)}"


def _waits(made: Report) -> str:
    timeline = made.timeline
    if timeline is None or not timeline.seconds:
        return ""
    return f"; {timeline.exposed_transfers / timeline.seconds:.0%} of it waiting for transfers"


def _duration(hours: float) -> str:
    return f"{hours:,.1f} hours" if hours < 100 else f"{hours / 24:,.1f} days"


if __name__ == "__main__":
    sys.exit(main())
