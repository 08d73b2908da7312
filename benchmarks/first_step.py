"""Compare the first step of an encoder-decoder of real size, state on disk, with transformers.

    python3 -m benchmarks.first_step nllb_1_3b_adamw --folder /scratch/mine --record records.json

In processes of their own, in float32 and without dropout:

1. random weights are exported for Hugging Face, and one optimizer step is trained on generated
   data, with the state on disk;
2. transformers computes the loss of the same batch from the export, and the norm of its gradients.

Both must agree. Adds a line of JSON to the record: loss, norm, seconds and memory of each process.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.disk_offload import append_record, build_config, parse_arguments
from config.errors import UserError
from config.sections import RunConfig
from data.samples import IGNORE_INDEX, Batch
from modelling.model_family import get_family
from run.checkpoint_manager import DISK_SHARD_BYTES
from run.records.throughput import peak_host_bytes
from sessions.training import TrainingSession
from terminal.entry_point import entry_point
from terminal.huge_pages import with_huge_pages

RUNS = ("base_adamw", "large_adamw", "nllb_1_3b_adamw")
"""Those of `benchmarks.disk_offload.RUNS` that train all weights of an encoder-decoder."""

TOLERANCE = 1e-4
"""Largest relative difference of losses, and of norms, both computed in float32."""


def exact_config(config: RunConfig) -> RunConfig:
    """Returns the configuration in float32, without dropout."""
    rates = ("model.dropout_prob", "model.attention_dropout", "model.activation_dropout")
    fields = {name: 0.0 for name in rates if hasattr(config.model, name.partition(".")[2])}
    return config.with_values({**fields, "model.precision": "float32"})


def first_batch(config: RunConfig) -> Batch:
    """Returns the global batch of generated samples that both programs compute."""
    count = config.training.global_batch_size
    return get_family(config).sample_format.make_random_samples(config, count, None).take(
        np.arange(count)
    )  # fmt: skip


# ---- the processes ------------------------------------------------------------------------------
def train_step(config: RunConfig, export: Path) -> dict[str, float]:
    """Export random weights to a Hugging Face folder, and train a step from them."""
    from huggingface.model_folders import write_hf_directory

    family = get_family(config)
    weight_map = family.weight_map(config)
    weights = weight_map.init_weights(config.model.seed)
    described = family.to_config_json(config)
    write_hf_directory(export, weight_map.to_hf(weights), described, DISK_SHARD_BYTES)
    model = TrainingSession(config)
    model.write(weights)
    del weights
    with model:
        start = time.perf_counter()
        (result,) = model.run([first_batch(config)], [1e-4])
        seconds = time.perf_counter() - start
    return {
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "seconds": seconds,
        "disk_bytes": model.session.memory_use().disk,
        "peak_host_bytes": peak_host_bytes(),
    }


def train_step_with_transformers(config: RunConfig, export: Path) -> dict[str, float]:
    """Compute loss and norm of the gradients with transformers' model, a sample at a time."""
    import torch
    from transformers import AutoModelForSeq2SeqLM

    model = AutoModelForSeq2SeqLM.from_pretrained(export, dtype=torch.float32).eval()
    batch = {name: torch.from_numpy(np.asarray(x)) for name, x in first_batch(config).items()}
    count, total = (batch["labels"] != IGNORE_INDEX).sum(), 0.0
    start = time.perf_counter()
    for row in range(len(batch["input_ids"])):
        given = {name: x[row : row + 1].long() for name, x in batch.items()}
        logits = model(
            input_ids=given["input_ids"],
            attention_mask=given["segment_ids"].clamp(max=1),
            decoder_input_ids=given["decoder_input_ids"],
        ).logits
        loss = torch.nn.functional.cross_entropy(
            logits[0], given["labels"][0], ignore_index=IGNORE_INDEX, reduction="sum"
        )
        (loss / count).backward()
        total += loss.item()
    squares = (p.grad.double().square().sum() for p in model.parameters() if p.grad is not None)
    return {
        "loss": total / count.item(),
        "grad_norm": math.sqrt(sum(square.item() for square in squares)),
        "seconds": time.perf_counter() - start,
        "peak_host_bytes": peak_host_bytes(),
    }


CHILDREN = {"ours": train_step, "transformers": train_step_with_transformers}


# ---- the parent ---------------------------------------------------------------------------------
def check_agreement(metrics: Mapping[str, Mapping[str, float]]) -> None:
    """Raise UserError if the programs' losses differ, or their norms."""
    for name in ("loss", "grad_norm"):
        found, expected = (metrics[child][name] for child in CHILDREN)
        if not abs(found - expected) <= TOLERANCE * abs(expected):
            raise UserError(f"our {name} is {found}, transformers' {expected}")


def measure(name: str, folder: Path) -> dict[str, Any]:
    """Run the processes in turn; returns their metrics.

    Raises:
        UserError: one failed, or they disagree.
    """
    metrics = {child: _run_child(name, child, folder) for child in CHILDREN}
    check_agreement(metrics)
    return metrics


def _run_child(name: str, child: str, folder: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.first_step", name, "--child", child,
               "--folder", str(folder)]  # fmt: skip
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, env=with_huge_pages(os.environ)
    )
    if done.returncode:
        raise UserError(f"{child} ended with code {done.returncode}: {' '.join(command)}")
    print(child, done.stdout, end="", file=sys.stderr)
    metrics: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return metrics


@entry_point(single_process=True)
def main(arguments: Sequence[str] | None = None) -> None:
    """Compare one run's first step with transformers, and add the metrics to the record file."""
    args = parse_arguments(__doc__, RUNS, CHILDREN, arguments)
    config = exact_config(build_config(args.run, str(args.folder / "disk")))
    export = args.folder / "export"
    if args.child:
        print(json.dumps(CHILDREN[args.child](config, export)))
        return
    if export.exists():
        raise UserError(f"--folder {args.folder} is not empty: name a new one")
    metrics = measure(args.run, args.folder)
    command = f"python3 -m benchmarks.first_step {args.run} --folder DIR"
    append_record(
        {"command": command, "host_memory": config.execution.host_memory, **metrics}, args.record
    )


if __name__ == "__main__":
    sys.exit(main())
