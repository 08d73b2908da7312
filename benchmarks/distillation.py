"""Compare a student distilled from a teacher with the same student trained on labels alone.

    python3 -m benchmarks.distillation --record benchmarks/results/distillation.jsonl

The teacher is the chat model of docs/own_task.md, trained first unless `--teacher` names it. The
student is half as wide and has a fifth of the conversations. For each seed both students begin with
the same weights and read the same samples in the same order; both are evaluated on the validation
split: the loss of the labels, and the fraction of exact answers.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import run_export
import run_finetuning
import run_validation
from benchmarks.disk_offload import append_record
from terminal.entry_point import entry_point
from terminal.parser import Parser, parse_count_option, parse_path_option

SAMPLE = Path(__file__).parents[1] / "data" / "sample"
MODEL = (
    *("--config", "qwen3_tiny", "--load", "random", "--model.vocab_size", "640"),
    *("--model.max_position_embeddings", "256", "--tokenizer", str(SAMPLE / "chat_tokenizer")),
)
HALF = (
    *("--hidden_size", "64", "--model.intermediate_size", "128"),
    *("--num_attention_heads", "4"),
)
CONVERSATIONS = SAMPLE / "conversations" / "train.jsonl"
TRAINING = (
    *("--config", "qwen3_tiny"),
    *("--data.validation", str(SAMPLE / "conversations" / "validation.jsonl")),
    *("--sequence_length", "128", "--examples_per_sample", "4"),
    *("--global_batch_size", "16", "--micro_batch_size", "16"),
)
SOFT = ("--training.temperature", "2")
"""Flags of the distillation."""

METRICS = {"cross_entropy": "loss", "distill": "cross_entropy"}
"""Metric of the labels' loss by objective."""


def train_model(folder: Path, model: Sequence[str], training: Sequence[str]) -> Path:
    """Train a model from random weights; returns the folder of the run.

    Args:
        folder: for the model and the run.
        model: flags of its sizes and seed.
        training: flags of its training.
    """
    start, run = folder / "model", folder / "run"
    _check_exit_code(run_export.main([*MODEL, *model, "--save-hf", str(start)]))
    _check_exit_code(
        run_finetuning.main(["--model", str(start), *TRAINING, *training, "--save", str(run)])
    )
    return run


def evaluate(run: Path, objective: str) -> dict[str, float]:
    """Evaluate a run: the loss of the labels, and the fraction of exact answers."""
    metric = METRICS[objective]
    _check_exit_code(
        run_validation.main(["--load", str(run), "--eval.metrics", f"{metric},exact_match"])
    )
    found = json.loads((run / "eval.json").read_text())
    return {"loss": round(found[metric], 4), "exact_match": round(found["exact_match"], 3)}


def _check_exit_code(code: int) -> None:
    if code:
        raise SystemExit(code)


def measure(folder: Path, rows: Path, teacher: Path, seed: int, steps: int) -> dict[str, Any]:
    """Train and evaluate the students of a seed.

    Args:
        rows: their conversations.
    """
    distil = ("--training.objective", "distill", "--training.teacher", str(teacher), *SOFT)
    results = {}
    for objective, more in (("cross_entropy", ()), ("distill", distil)):
        run = train_model(
            folder / f"{objective}-{seed}",
            (*HALF, "--seed", str(seed)),
            (*more, "--data.train", str(rows), "--steps", str(steps), "--seed", str(seed)),
        )
        results[objective] = evaluate(run, objective)
    return {"seed": seed, **results}


@entry_point()
def main(arguments: Sequence[str] | None = None) -> None:
    """Train the students of each seed, print a JSON line, and add it to the record file."""
    given = [*(sys.argv[1:] if arguments is None else arguments)]
    parser = Parser.of_script(__doc__)
    parser.add_argument("--teacher", type=parse_path_option, help="run of the chat model")
    parser.add_argument(
        "--teacher_steps", type=parse_count_option, default=600, help="where it is trained first"
    )
    parser.add_argument("--rows", type=parse_count_option, default=400, help="of the students")
    parser.add_argument("--steps", type=parse_count_option, default=600, help="of the students")
    parser.add_argument("--seeds", type=parse_count_option, nargs="+", default=[1, 2, 3])
    parser.add_argument("--record", type=Path, help="file of records")
    args = parser.parse_args(given)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = folder / "rows.jsonl"
        rows.write_text("".join(CONVERSATIONS.open().readlines()[: args.rows]))
        all_rows = ("--data.train", str(CONVERSATIONS), "--steps", str(args.teacher_steps))
        teacher = args.teacher or train_model(folder / "teacher", (), all_rows)
        seeds = [measure(folder, rows, Path(teacher), seed, args.steps) for seed in args.seeds]
    means = {
        objective: {
            metric: round(fmean(seed[objective][metric] for seed in seeds), 4)
            for metric in ("loss", "exact_match")
        }
        for objective in METRICS
    }
    command = f"python3 -m benchmarks.distillation --rows {args.rows} --steps {args.steps}"
    command += f" --seeds {' '.join(map(str, args.seeds))}"
    record = {"command": command, "flags": " ".join(SOFT), "seeds": seeds, "means": means}
    append_record(record, args.record)


if __name__ == "__main__":
    main()
