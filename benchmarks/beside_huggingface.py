"""Our speed beside Hugging Face's on torch: the same weights, batch and optimizer, in turn.

    python3 -m benchmarks.beside_huggingface --config small
    python3 -m benchmarks.beside_huggingface --config gptj_small --micro_batch_size 4 --rounds 9

Training: an optimizer step with activations recomputed and kept, beside torch with and without
gradient checkpointing. Generation: one run of the program beside `generate`. Programs run one after
the other, `--rounds` times; a ratio is the median of the rounds' ratios, so that noise which lasts
longer than a round drops out. Before that, losses and tokens are compared: the speed of another
computation would mean nothing. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from config.cli import entry_point, read_command_line
from config.errors import UserError
from config.sections import RunConfig
from data.loader import Loader
from finetuning import FineTuning
from inference import Inference
from modelling.spec import Batch, family_of
from training.side_by_side import need_torch

LEARNING_RATE = 1e-4
LOSS_TOLERANCE = 1e-4

Program = Callable[[], object]


@dataclass(frozen=True)
class Comparison:
    """What one kind of work takes.

    Attributes:
        seconds: medians by program.
        ratios: seconds of a program of torch's over those of one of ours, "theirs / ours".
        samples_per_second: by program.
        flops: operations that the work needs, nothing computed twice; see `model_flops`.
        of_matrix_rate: `flops` per second of each program, as a part of the machine's measured
            matrix rate.
    """

    seconds: dict[str, float]
    ratios: dict[str, float]
    samples_per_second: dict[str, float]
    flops: float
    of_matrix_rate: dict[str, float]


def training_programs(config: RunConfig, batch: Batch) -> dict[str, Program]:
    """Optimizer steps by name, each on its own copy of the same weights.

    Raises:
        UserError: the losses of the first step differ.
    """
    from benchmarks.huggingface import TorchTraining

    family = family_of(config)
    weights = family.weights(config).initial(config.model.seed)
    programs: dict[str, Callable[[], float]] = {}
    for activations in ("recompute", "keep"):
        execution = replace(config.execution, activations=activations)
        model = FineTuning(replace(config, execution=execution))
        model.write(weights)
        model.__enter__()  # for as long as the process lives
        programs[activations] = lambda m=model: m.run([batch], [LEARNING_RATE])[0].loss
    for name, checkpointing in (("torch, checkpointing", True), ("torch", False)):
        torch_model = TorchTraining(config, weights, checkpointing)
        programs[name] = lambda m=torch_model: m.step(batch, LEARNING_RATE)
    losses = {name: step() for name, step in programs.items()}
    if np.ptp(list(losses.values())) > LOSS_TOLERANCE * max(map(abs, losses.values())):
        raise UserError(f"the losses of the first step differ: {losses}")
    return dict(programs)


def generation_programs(config: RunConfig) -> dict[str, Program]:
    """Generation for one micro-batch, by name.

    Raises:
        UserError: the tokens differ.
    """
    from benchmarks.huggingface import generate, model_of

    family = family_of(config)
    weights = family.weights(config).initial(config.model.seed)
    ours = Inference(config)
    ours.write(weights)
    ours.__enter__()
    length = ours.program.words.shape[1]
    rng = np.random.default_rng(config.model.seed)
    words = rng.integers(
        2, config.model.embedding.vocab_size, (ours.samples_per_run, length), np.int32
    )
    mask = np.ones_like(words)
    theirs = model_of(config, weights)
    tokens = ours.generate(words, mask)
    found = generate(theirs, words, mask, tokens.shape[1])
    if not np.array_equal(tokens[:, : found.shape[1]], found):
        raise UserError("the generated tokens differ")
    return {
        "ours": lambda: ours.generate(words, mask),
        "torch": lambda: generate(theirs, words, mask, tokens.shape[1]),
    }


def compare(
    programs: Mapping[str, Program], samples: int, rounds: int, flops: float, rate: float
) -> Comparison:
    """Run the programs in turn, `rounds` times, after one round to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds + 1):
        for name, program in programs.items():
            start = time.perf_counter()
            program()
            seconds[name].append(time.perf_counter() - start)
    measured = {name: values[1:] for name, values in seconds.items()}
    medians = {name: statistics.median(values) for name, values in measured.items()}
    theirs = [name for name in programs if name.startswith("torch")]
    ratios = {
        f"{a} / {b}": statistics.median(np.divide(measured[a], measured[b]).tolist())
        for a in theirs
        for b in programs
        if b not in theirs
    }
    return Comparison(
        medians,
        ratios,
        {name: samples / s for name, s in medians.items()},
        flops,
        {name: flops / s / rate for name, s in medians.items()},
    )


def model_flops(work: Program) -> float:
    """Floating-point operations of torch's matrix products in `work`, a product with an addition
    counted as two."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        work()
    return float(counter.get_total_flops())


def text(name: str, found: Comparison) -> str:
    """For a person."""
    lines = [f"{name:22}  seconds  samples/s  of the matrix rate"]
    lines += [
        f"  {program:20}  {s:7.3f}  {found.samples_per_second[program]:9.2f}  "
        f"{found.of_matrix_rate[program]:17.0%}"
        for program, s in found.seconds.items()
    ]
    lines += [f"  {pair}: {ratio:.2f}" for pair, ratio in found.ratios.items()]
    return "\n".join(lines)


@entry_point()
def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    line = read_command_line(
        __doc__.partition("\n")[0], "finetuning", "small", arguments, _add_options
    )
    need_torch()
    from benchmarks.matrix_rate import matrix_rate

    given, rounds = line.options.work, line.options.rounds
    config = _on_one_device(line.config)
    rate, samples = matrix_rate(), config.execution.micro_batch_size
    results = {}
    if given in ("training", "both"):
        loader = Loader(family_of(config).generate(config, samples), samples, config.model.seed)
        programs = training_programs(config, loader.next_batch())
        flops = model_flops(programs["torch"])
        results["training"] = compare(programs, samples, rounds, flops, rate)
    if given in ("generation", "both"):
        programs = generation_programs(config)
        flops = model_flops(programs["torch"])
        results["generation"] = compare(programs, samples, rounds, flops, rate)
    print("\n".join(text(name, found) for name, found in results.items()))
    facts = {"benchmark": "beside_huggingface", "config": line.preset, "matrix_rate": rate}
    facts |= {"samples": samples, "rounds": rounds}
    print(json.dumps(facts | {name: asdict(found) for name, found in results.items()}))


def _on_one_device(config: RunConfig) -> RunConfig:
    """One micro-batch a step on one device: what torch does."""
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
    parser.add_argument("--rounds", type=int, default=5, help="times each program runs")
    parser.add_argument("--work", choices=("training", "generation", "both"), default="both")


if __name__ == "__main__":
    sys.exit(main())
