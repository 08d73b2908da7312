"""Measured speed of generation by random weights, from generated prompts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from config.flags import UnusedFields
from config.sections import RunConfig
from modelling.model_family import get_family
from planning.requirements import generation_requirements
from run.generated_data_benchmark import FlopsUtilization, report_throughput
from sessions.generation import GenerationSession

UNUSED = UnusedFields(
    names=(
        *("data", "checkpoint", "eval", "training", "model.dropout_prob"),
        *("adapter.dropout", "adapter.modules_to_save"),
        *("execution.loss_scaling", "execution.activations", "execution.update"),
        "execution.micro_batches_per_pass",
        *("execution.placement", "execution.resident_layers", "execution.master_weights"),
        *("execution.code_load", "execution.quantized_cache", "execution.expert_groups"),
        *("generation.max_tokens", "generation.stop_strings"),
    ),
    used=("data.examples_per_sample", "checkpoint.load", "training.global_batch_size"),
    reason="it measures how random weights answer generated prompts",
)


@dataclass(frozen=True)
class GenerationThroughput:
    """Measured speed of generation; seconds are medians over the runs.

    Attributes:
        startup_seconds: time to build, trace and compile the program.
        compile_seconds: time to trace and compile it.
        seconds_per_run: time of a run of the program, with the transfers from and to the host.
        tokens_per_second: generated tokens per second, end tokens included.
    """

    samples_per_run: int
    prompt_length: int
    output_length: int
    startup_seconds: float
    compile_seconds: float
    seconds_per_run: float
    samples_per_second: float
    tokens_per_second: float
    machine: FlopsUtilization


def measure_throughput(config: RunConfig, runs: int) -> GenerationThroughput:
    """Build and run a generation program, once to warm up and then `runs` timed times."""
    family, start = get_family(config), time.perf_counter()
    inference = GenerationSession(config)
    startup = time.perf_counter() - start
    samples, length = inference.samples_per_run, inference.program.input_ids.shape[1]
    rng = np.random.default_rng(config.model.seed)
    input_ids = rng.integers(2, config.model.vocab_size, (samples, length), np.int32)
    mask = np.ones_like(input_ids)
    seconds = []
    with inference:
        inference.write(family.weight_map(config).init_weights(config.model.seed))
        tokens = inference.generate(input_ids, mask)
        for _ in range(runs):
            start = time.perf_counter()
            inference.generate(input_ids, mask)
            seconds.append(time.perf_counter() - start)
    per_run = statistics.median(seconds)
    return GenerationThroughput(
        samples,
        length,
        tokens.shape[1],
        startup,
        inference.session.startup_stats.seconds,
        per_run,
        samples / per_run,
        np.count_nonzero(tokens) / per_run,
        FlopsUtilization.measure(config, generation_requirements, samples / per_run),
    )


def _format_speed(measured: GenerationThroughput) -> str:
    return (
        f"{measured.samples_per_second:.1f} samples/s, "
        f"{measured.tokens_per_second:.1f} tokens/s, "
        f"{measured.machine.of_matrix_rate:.0%} of the machine's matrix rate, "
        f"{measured.startup_seconds:.1f} s to build and compile"
    )


def report(doc: str | None, arguments: Sequence[str] | None) -> None:
    """Measure the generation speed of a command line's configuration, and print it."""
    report_throughput(
        "inference",
        doc,
        arguments,
        measure_throughput,
        _format_speed,
        generation_requirements,
        UNUSED,
    )
