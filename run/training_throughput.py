"""Measured speed of training on generated data, from random weights."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from config.errors import ConfigError
from config.flags import UnusedFields
from config.sections import RunConfig
from data.loader import Loader
from modelling.model_family import get_family
from planning.hardware.disk_offload import host_bytes_per_process
from planning.requirements import finetuning_requirements
from run.generated_data_benchmark import FlopsUtilization, report_throughput
from run.records.throughput import peak_host_bytes
from sessions.training import StepResult, TrainingSession

UNUSED = UnusedFields(
    names=(
        *("data", "checkpoint", "eval", "generation", "execution.quantized_cache"),
        "model.output_length",
        *("training.steps", "training.epochs", "training.max_skipped_steps"),
        *("training.optimizer.learning_rate", "training.reference_cache", "training.beta"),
        *("training.gamma", "training.multi_label", "training.center_rewards_coefficient"),
        *("training.teacher", "training.teacher_quantization", "training.teacher_cache"),
        *("training.top_k", "training.temperature", "training.distill_weight"),
        "training.distill_rest",
        *("training.epsilon", "training.epsilon_high", "training.scale_rewards"),
        *("training.max_completion_length", "training.mask_truncated_completions"),
    ),
    used=("data.examples_per_sample", "checkpoint.load"),
    reason="it measures steps of training on generated data, from random weights",
)


@dataclass(frozen=True)
class TrainingThroughput:
    """Measured speed, memory and disk traffic of training; seconds are medians over the runs.

    Attributes:
        startup_seconds: time to build, trace and compile the program.
        compile_seconds: time to trace and compile it.
        start_parts: seconds from the start of the process to the end of the first step, by part;
            imports include the command line, and its plan.
        seconds_per_step: time of an optimizer step, with the transfers from the host.
        target_tokens_per_second: loss tokens per second.
        compute_bytes: device memory of one replica, without the model's state.
        remote_bytes: host memory of one replica's remote buffers.
        disk_bytes: size of one replica's entries on disk.
        disk_read, disk_written: bytes that this process reads and writes in a step.
        planned_host_bytes: planned memory of the process, where devices are virtual.
        kernel_fraction: fraction of the processor time that the kernel took.
        seconds_besides_disk: time of a step inside `without_disk`; None if there is none.
    """

    samples_per_step: int
    startup_seconds: float
    compile_seconds: float
    start_parts: dict[str, float]
    seconds_per_step: float
    samples_per_second: float
    target_tokens_per_second: float
    compute_bytes: int
    remote_bytes: int
    disk_bytes: int
    disk_read: float
    disk_written: float
    planned_host_bytes: int
    kernel_fraction: float
    seconds_besides_disk: float | None
    loss: float
    machine: FlopsUtilization


def measure_throughput(
    config: RunConfig,
    runs: int,
    without_disk: Callable[[], AbstractContextManager[None]] | None = None,
) -> TrainingThroughput:
    """Build and run a training program, once to warm up and then `runs` timed times.

    Args:
        without_disk: a context in which requests to the disk take no time.
    """
    if config.training.row_type or config.training.teacher:
        raise ConfigError(
            f"generated data are texts alone, without what {config.training.objective} learns "
            "from: give --training.objective cross_entropy"
        )
    family, imports = get_family(config), seconds_since_process_start()
    start = time.perf_counter()
    model = TrainingSession(config)
    startup = time.perf_counter() - start
    samples, iterations = config.training.global_batch_size, config.execution.device_iterations
    loader = Loader.from_config(
        config, family.sample_format.make_random_samples(config, 4 * samples, None)
    )
    model.write(family.weight_map(config).init_weights(config.model.seed))
    compilation = model.session.startup_stats.seconds
    parts = {"imports": imports, "program": startup - compilation, "compilation": compilation}
    parts["data and weights"] = time.perf_counter() - start - startup

    def train_step(run: int) -> tuple[float, list[StepResult]]:
        batches = [loader.next_batch() for _ in range(iterations)]
        start = time.perf_counter()
        results = model.run(batches, [1e-4] * iterations, run * iterations)
        return (time.perf_counter() - start) / iterations, results

    seconds, tokens, besides_disk = [], [], None
    with model:
        parts["first step"] = train_step(0)[0] * iterations
        before, cpu = model.session.disk_traffic, os.times()
        for run in range(1, runs + 1):
            taken, results = train_step(run)
            seconds.append(taken)
            tokens.append(sum(result.target_tokens for result in results) / iterations)
        after, in_kernel = model.session.disk_traffic, os_kernel_time_fraction(cpu, os.times())
        peak = peak_host_bytes()
        if without_disk is not None:
            with without_disk():
                besides_disk = min(train_step(run)[0] for run in range(runs + 1, runs + 3))
    per_step, memory = statistics.median(seconds), model.session.memory_use()
    use = FlopsUtilization.measure(config, finetuning_requirements, samples / per_step)
    return TrainingThroughput(
        samples,
        startup,
        compilation,
        parts,
        per_step,
        samples / per_step,
        statistics.mean(tokens) / per_step,
        memory.temporaries + memory.streams,
        memory.remote,
        memory.disk,
        (after.read - before.read) / (runs * iterations),
        (after.written - before.written) / (runs * iterations),
        host_bytes_per_process(memory, config.num_replicas),
        in_kernel,
        besides_disk,
        results[-1].loss,
        replace(use, peak_host_bytes=peak),
    )


def seconds_since_process_start() -> float:
    """Returns the age of this process, restarts included; without /proc, its processor time."""
    try:
        started = int(Path("/proc/self/stat").read_text("utf-8").rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return time.process_time()


def os_kernel_time_fraction(before: os.times_result, after: os.times_result) -> float:
    """Returns the fraction of this process's CPU time spent in the operating system's kernel."""
    user, system = after.user - before.user, after.system - before.system
    return system / max(user + system, 1e-9)


def summary(measured: TrainingThroughput) -> str:
    """Returns a one-line summary of the measured training speed."""
    return (
        f"{measured.samples_per_second:.1f} samples/s, "
        f"{measured.seconds_per_step:.3f} s a step, "
        f"{measured.machine.of_matrix_rate:.0%} of the machine's matrix rate, "
        f"{measured.startup_seconds:.1f} s to build and compile"
    )


def report(doc: str | None, arguments: Sequence[str] | None) -> None:
    """Measure the training speed of a command line's configuration, and print it."""
    report_throughput(
        "finetuning", doc, arguments, measure_throughput, summary, finetuning_requirements, UNUSED
    )
