"""Train, evaluate or generate with models of real size whose training state is on disk.

    python3 -m benchmarks.disk_offload xl_adamw --folder /scratch/mine --record records.json

Runs once to warm up and then some measured times, on generated data with random weights: training,
the validation loss, or generation layer by layer. Adds a line of JSON to the record: seconds, the
fraction of the machine's matrix rate, bytes to and from disk, memory beside the plan, and the
command.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from config.families import load_finetuning_config
from config.sections import RunConfig
from files.atomic_writing import write_text_atomically
from modelling.model_family import get_family
from planning.hardware.disk_offload import host_bytes_per_process
from planning.hardware.local_machine import measure_disk_rates
from planning.hardware.machines import machine
from planning.hardware.resource_errors import explain_resource_errors
from planning.requirements import finetuning_requirements, plan_on_machine
from popxl._storage.scratch_files import ScratchFile
from run.records.throughput import peak_host_bytes
from run.training_throughput import measure_throughput
from run.training_throughput import summary as summary_of
from sessions.generation import GenerationSession
from sessions.loss_evaluation import LossSession
from sessions.session import ModelSession
from terminal.entry_point import entry_point
from terminal.parser import Parser


@contextmanager
def idle_disk() -> Iterator[None]:
    """A context in which file reads and writes of offloaded state do nothing; contents are lost.

    Checksums are still computed, because they take processor time.
    """
    request, verify = ScratchFile._transfer_parts, ScratchFile._verify_checksum
    ScratchFile._transfer_parts = lambda *_: None  # type: ignore[method-assign]
    ScratchFile._verify_checksum = lambda *_: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        ScratchFile._transfer_parts, ScratchFile._verify_checksum = request, verify  # type: ignore[method-assign]


@dataclass(frozen=True)
class OffloadRun:
    """A measured run: preset, changed fields, kind of work and memory limit.

    Attributes:
        preset: of fine-tuning.
        host_memory: gigabytes that the process may take.
        batch: samples of a step, or prompts at once.
        changes: of the preset.
        steps: that are measured.
    """

    preset: str
    host_memory: float
    batch: int
    changes: Mapping[str, Any]
    kind: Literal["training", "validation", "generation"] = "training"
    steps: int = 3


ADAFACTOR = {"training": {"optimizer": {"name": "adafactor"}}}
COMPACT = {
    "training": {
        "optimizer": {"state": "8bit_residual8"},
        "gradient_dtype": "bfloat16",
        "stochastic_rounding": False,
    }
}
ADAPTERS = {"adapter": {"rank": 16, "targets": "all-linear"}}
IN_4_BITS = {**ADAPTERS, "model": {"quantization": "int4"}}
SHORT_IN_4_BITS = {**ADAPTERS, "model": {"quantization": "int4", "sequence_length": 256}}
OLMOE = {
    "model_type": "olmoe",
    "num_hidden_layers": 16,
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "moe_intermediate_size": None,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 50304,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 10000},
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
    "bos_token_id": None,
    "eos_token_id": 50279,
    "pad_token_id": 1,
}
"""allenai/OLMoE-1B-7B-0924: 6.9 B parameters, 1.3 B of a token."""
RUNS: Mapping[str, OffloadRun] = {
    "base_adamw": OffloadRun("base", 2.5, 4, {}),
    "base_validation": OffloadRun("base", 1.8, 4, {}, "validation"),
    "base_generation": OffloadRun("base", 1.8, 4, {}, "generation"),
    "large_adamw": OffloadRun("large", 6.0, 8, {}),
    "xl_adamw": OffloadRun("xl_gpu", 9.0, 4, {}),
    "xl_adamw_of_one": OffloadRun("xl_gpu", 9.0, 1, {}),  # the disk has the least to hide behind
    "xl_compact_of_one": OffloadRun("xl_gpu", 9.0, 1, COMPACT),
    "xl_validation": OffloadRun("xl_gpu", 3.75, 4, {}, "validation"),
    "xl_generation": OffloadRun("xl_gpu", 3.75, 4, {}, "generation"),
    "nllb_1_3b_adamw": OffloadRun("nllb_1_3B", 8.0, 4, {}),
    "gptj_6b_adamw": OffloadRun("gptj_6B_gpu", 15.0, 1, COMPACT, steps=1),
    "gptj_6b_adafactor": OffloadRun("gptj_6B_gpu", 15.0, 1, ADAFACTOR, steps=1),
    "xl_adapters": OffloadRun("xl_gpu", 9.0, 4, ADAPTERS),
    "xl_adapters_int4": OffloadRun("xl_gpu", 5.0, 4, IN_4_BITS),
    "gptj_6b_adapters": OffloadRun("gptj_6B_gpu", 15.0, 1, ADAPTERS, steps=1),
    "gptj_6b_adapters_int4": OffloadRun("gptj_6B_gpu", 8.0, 1, IN_4_BITS, steps=1),
    "llama_8b_adapters_int4": OffloadRun("llama3_1_8B", 7.0, 1, SHORT_IN_4_BITS, steps=1),
    "olmoe_7b": OffloadRun("qwen3_30B_A3B", 15.0, 4, {**COMPACT, "model": OLMOE}, steps=1),
}


def build_config(
    name: str, folder: str, host_memory: float | None = None, save: str | None = None
) -> Any:
    """Build the configuration of an entry of `RUNS`, with a micro-batch of 1.

    Args:
        host_memory: gigabytes, if not the run's.
    """
    run = RUNS[name]
    execution = {
        "micro_batch_size": 1,
        "disk": folder,
        "host_memory": host_memory or run.host_memory,
        "device": "cpu",
    }
    training = {**run.changes.get("training", {}), "global_batch_size": run.batch}
    overrides = {
        **run.changes,
        "training": training,
        "execution": execution,
        "checkpoint": {"load": None, "save": save},
        "generation": {"weights": "streamed"},
    }
    return load_finetuning_config(run.preset, overrides)


def measure_evaluation(config: RunConfig, kind: str, runs: int) -> dict[str, Any]:
    """Measure the validation loss, or generation with streamed layers."""
    family = get_family(config)
    model: ModelSession
    samples = family.sample_format.make_random_samples(
        config, config.training.global_batch_size, None
    )
    if kind == "validation":
        losses = model = LossSession(config)
        run_once: Callable[[], object] = lambda: losses.compute(samples)  # noqa: E731
    else:
        inference = model = GenerationSession(config)
        shape = inference.samples_per_run, inference.program.input_ids.shape[1]
        input_ids = np.random.default_rng(0).integers(2, 1000, shape, np.int32)
        run_once = lambda: inference.generate(input_ids, np.ones_like(input_ids))  # noqa: E731
    model.write(family.weight_map(config).init_weights(config.model.seed))
    seconds, traffic = [], []
    with model:
        for _ in range(runs + 1):
            start = time.perf_counter()
            run_once()
            seconds.append(time.perf_counter() - start)
            traffic.append(model.session.disk_traffic)
    memory = model.session.memory_use()
    samples_per_run, per_run = config.training.global_batch_size, statistics.median(seconds[1:])
    written = samples_per_run * _answer_tokens(config)
    return {
        "samples_per_run": samples_per_run,
        "seconds_per_run": per_run,
        **({"tokens_per_second": written / per_run} if kind == "generation" else {}),
        "disk_bytes": memory.disk,
        "disk_read": (traffic[-1].read - traffic[0].read) / runs,
        "disk_written": (traffic[-1].written - traffic[0].written) / runs,
        "planned_host_bytes": host_bytes_per_process(memory, config.num_replicas),
        "peak_host_bytes": peak_host_bytes(),
    }


def _answer_tokens(config: RunConfig) -> int:
    """Returns the number of tokens that a generation program generates per prompt."""
    model: Any = config.model
    return model.decoder_sequence_length if config.family == "t5" else model.output_length


def measure_training(config: RunConfig, runs: int) -> dict[str, Any]:
    """Measure the seconds and the disk traffic of training steps."""
    measured = measure_throughput(config, runs, idle_disk)
    print(summary_of(measured))
    metrics = asdict(measured)
    metrics |= metrics.pop("machine")
    return metrics | _disk_time_lower_bound(config, metrics)


def _disk_time_lower_bound(config: RunConfig, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Returns disk traffic and rates, and the seconds that a training step takes at least.

    The bound is the longer of a step without disk requests and its traffic at the disk's rate.
    """
    roomy = replace(machine("laptop"), host_memory=1e15)  # the configuration has the limit
    requirements = plan_on_machine(finetuning_requirements(config), roomy)
    read, write = measure_disk_rates(config.execution.disk or ".")
    disk = metrics["disk_read"] / read + metrics["disk_written"] / write
    bound = max(metrics["seconds_besides_disk"], disk)
    return {
        "planned_disk_read": sum(part.disk_read for part in requirements.plan.parts),
        "planned_disk_written": sum(part.disk_written for part in requirements.plan.parts),
        "disk_read_rate": read,
        "disk_write_rate": write,
        "disk_seconds": disk,
        "of_bound": bound / metrics["seconds_per_step"],
    }


def parse_arguments(
    description: str | None,
    runs: Collection[str],
    children: Collection[str],
    arguments: Sequence[str] | None,
) -> argparse.Namespace:
    """Parse the command line of a benchmark that measures one run in child processes.

    Args:
        description: the benchmark's docstring, whose first line is shown as help.
        runs, children: names of the runs, and of what a child process does.
        arguments: None: those of this process.
    """
    parser = Parser.of_script(description)
    parser.add_argument("run", choices=runs, help="which model")
    parser.add_argument("--folder", required=True, type=Path, help="an empty one, of a local disk")
    parser.add_argument("--record", type=Path, help="file that the line of JSON is added to")
    parser.add_argument("--child", choices=children, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def append_record(metrics: Mapping[str, Any], path: Path | None) -> None:
    """Print metrics as JSON, and replace the record file's line of the same benchmark command."""
    print(json.dumps(metrics))
    if path is not None:
        lines = path.read_text("utf-8").splitlines() if path.exists() else []
        other_lines = [line for line in lines if json.loads(line)["command"] != metrics["command"]]
        write_text_atomically(
            "the record", path, "".join(f"{line}\n" for line in (*other_lines, json.dumps(metrics)))
        )


@entry_point()
def main(arguments: Sequence[str] | None = None) -> None:
    """Measure one entry of `RUNS`, print its metrics, and add them to the record file."""
    parser = Parser.of_script(__doc__)
    parser.add_argument("run", choices=RUNS, help="which model, and what of it")
    parser.add_argument("--folder", required=True, help="a folder of a local disk, for the state")
    parser.add_argument("--record", type=Path, help="file that the line of JSON is added to")
    args = parser.parse_args(arguments)
    run, config = RUNS[args.run], build_config(args.run, args.folder)
    with explain_resource_errors(run.preset, config):
        metrics = (
            measure_training(config, run.steps)
            if run.kind == "training"
            else measure_evaluation(config, run.kind, run.steps)
        )
    command = f"python3 -m benchmarks.disk_offload {args.run} --folder DIR"
    append_record(
        {"command": command, "host_memory": config.execution.host_memory, **metrics},
        args.record,
    )


if __name__ == "__main__":
    sys.exit(main())
