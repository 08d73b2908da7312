"""Compare the speed of this program and Hugging Face's model in torch, on equal work.

    python3 -m benchmarks.vs_huggingface --config small
    python3 -m benchmarks.vs_huggingface --config small --generated_tokens 54 \
        --examples_per_sample 4 --prompts 128
    python3 -m benchmarks.vs_huggingface --config gptj_small --micro_batch_size 4 --rounds 9

Training: an optimizer step on a micro-batch of examples, with activations recomputed and kept,
compared with torch with and without gradient checkpointing, and for Llamas with one JAX program
with all state on the device (`benchmarks/reference_training.py`). Generation: answers to
`--prompts` prompts, compared with `generate`. Each program has a process of its own. They take
turns, `--rounds` times; a ratio is the median of the rounds' ratios, which cancels noise that lasts
longer than a round. Before that, losses and tokens are compared: the speed of another computation
would mean nothing. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from benchmarks.implementations import (
    GENERATION,
    OURS,
    Worker,
    generation_implementation,
    serve,
    training_implementation,
    training_programs,
)
from config.errors import UserError
from config.sections import RunConfig
from huggingface.torch_model import require_torch
from planning.hardware.matrix_rate import measure_matmul_rate
from run import training_throughput
from terminal.command_line import CommandLine, read_command_line
from terminal.entry_point import entry_point
from terminal.parser import parse_count_option

LOSS_TOLERANCE = 1e-4

UNUSED = replace(
    training_throughput.UNUSED,
    used=("data.examples_per_sample", "model.output_length"),
    reason="it compares presets on generated data, from random weights",
)

WORK = ("training", "generation")


@dataclass(frozen=True)
class SpeedComparison:
    """Measured speed of all compared programs, for training or for generation.

    Attributes:
        samples: examples that a program works on in a run.
        seconds: medians by program.
        ratios: seconds of a program of others over those of one of ours, "theirs / ours".
        samples_per_second: by program.
        flops: operations that the work needs, no padding and nothing computed twice.
        of_matrix_rate: `flops` per second of each program, as a part of the machine's measured
            matrix rate.
    """

    samples: int
    seconds: dict[str, float]
    ratios: dict[str, float]
    samples_per_second: dict[str, float]
    flops: float
    of_matrix_rate: dict[str, float]


def check_results(results: Mapping[str, Any]) -> None:
    """Raise UserError if compared programs computed different losses or tokens."""
    values = list(results.values())
    if isinstance(values[0], float):
        if np.ptp(values) > LOSS_TOLERANCE * max(map(abs, values)):
            raise UserError(f"the losses of the first step differ: {dict(results)}")
    elif any(other != values[0] for other in values):
        raise UserError("the generated tokens differ")


def measure_interleaved(
    workers: Mapping[str, Worker], samples: int, rounds: int, rate: float
) -> SpeedComparison:
    """Run the compared programs in turn, `rounds` times, after one uncounted warm-up round.

    Args:
        rate: operations per second of large matrix products.
    """
    info = {name: worker.info() for name, worker in workers.items()}
    check_results({name: said["result"] for name, said in info.items()})
    flops = next(said["flops"] for said in info.values() if said["flops"])
    seconds: dict[str, list[float]] = {name: [] for name in workers}
    for _ in range(rounds + 1):
        for name, worker in workers.items():
            seconds[name].append(worker.run())
    measured = {name: values[1:] for name, values in seconds.items()}
    medians = {name: statistics.median(values) for name, values in measured.items()}
    ours = [name for name in workers if name in (*OURS, *GENERATION[:1])]
    ratios = {
        f"{a} / {b}": statistics.median(np.divide(measured[a], measured[b]).tolist())
        for a in workers
        if a not in ours
        for b in ours
    }
    return SpeedComparison(
        samples,
        medians,
        ratios,
        {name: samples / s for name, s in medians.items()},
        flops,
        {name: flops / s / rate for name, s in medians.items()},
    )


def format_comparison(name: str, comparison: SpeedComparison) -> str:
    """Returns a text table of the compared programs' speed."""
    lines = [f"{name:22}  seconds  samples/s  of the matrix rate"]
    lines += [
        f"  {program:20}  {s:7.3f}  {comparison.samples_per_second[program]:9.2f}  "
        f"{comparison.of_matrix_rate[program]:17.0%}"
        for program, s in comparison.seconds.items()
    ]
    lines += [f"  {pair}: {ratio:.2f}" for pair, ratio in comparison.ratios.items()]
    return "\n".join(lines)


@entry_point()
def main(arguments: Sequence[str] | None = None) -> None:
    """Compare programs' speed and print a table, or serve one of the programs to a `Worker`."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    description = __doc__.partition("\n")[0]
    line = read_command_line(description, "finetuning", "small", argv, _add_options, unused=UNUSED)
    line = replace(line, config=_single_device_config(line.config))
    require_torch()
    if line.options.program is not None:
        _serve_program(line)
        return
    rate, work = measure_matmul_rate(), line.options.work
    results = {
        kind: _compare_programs(kind, argv, line, rate)
        for kind in (WORK if work == "both" else [work])
    }
    print("\n".join(format_comparison(name, comparison) for name, comparison in results.items()))
    info = {"benchmark": "vs_huggingface", "config": line.preset, "matrix_rate": rate}
    info |= {"rounds": line.options.rounds}
    print(json.dumps(info | {name: asdict(comparison) for name, comparison in results.items()}))


def _compare_programs(
    kind: str, argv: Sequence[str], line: CommandLine, rate: float
) -> SpeedComparison:
    """Compare the programs' speed in training or generation; each runs in a child process."""
    command = [sys.executable, "-m", "benchmarks.vs_huggingface", *argv]
    trains = kind == "training"
    programs = training_programs(line.config) if trains else GENERATION
    samples = line.config.execution.micro_batch_size if trains else _prompt_count(line)
    with ExitStack() as stack:
        workers = {
            name: stack.enter_context(Worker(name, [*command, "--program", f"{kind}:{name}"]))
            for name in programs
        }
        return measure_interleaved(workers, samples, line.options.rounds, rate)


def _serve_program(line: CommandLine) -> None:
    """Run a program for the `Worker` of the parent process."""
    kind, name = line.options.program.split(":")
    if kind == "training":
        implementation = training_implementation(name, line.config, line.options.generated_tokens)
    else:
        implementation = generation_implementation(
            name, line.config, _prompt_count(line), line.options.generated_tokens
        )
    serve(implementation.info, implementation.run_timed)


def _prompt_count(line: CommandLine) -> int:
    return int(line.options.prompts or line.config.execution.micro_batch_size)


def _single_device_config(config: RunConfig) -> RunConfig:
    """Returns the configuration with one micro-batch per step on one device, as torch runs it."""
    execution = replace(
        config.execution,
        data_parallel=1,
        tensor_parallel=1,
        device_iterations=1,
        device="cpu",
    )
    return replace(
        config,
        model=replace(config.model, dropout_prob=0.0),
        training=replace(config.training, global_batch_size=execution.micro_batch_size),
        execution=execution,
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rounds", type=parse_count_option, default=5, help="times each program runs"
    )
    parser.add_argument("--work", choices=(*WORK, "both"), default="both")
    parser.add_argument(
        "--generated_tokens",
        type=float,
        metavar="MEAN",
        help="mean tokens of a prompt, with the spread of texts (standard deviation 0.45 of the "
        "logarithm); by default from half to all of what a sample has room for",
    )
    parser.add_argument(
        "--prompts", type=parse_count_option, help="to answer; by default a micro-batch"
    )
    parser.add_argument("--program", help=argparse.SUPPRESS)  # of a child process


if __name__ == "__main__":
    sys.exit(main())
