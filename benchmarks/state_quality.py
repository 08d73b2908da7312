"""Training with compact state beside float32: losses, answers and weights, with several seeds.

    python3 -m benchmarks.state_quality --out runs/state
    python3 -m benchmarks.state_quality --out runs/state --tasks tiny --seeds 1 --steps 100

A seed gives the order of the samples; all runs of a task begin with the same weights. Each trains
with run_finetuning.py and validates with run_validation.py. What is done is kept in the folder and
not done again. Ends with a table: means, and in parentheses what each seed gave; and how far the
final weights are from those of float32, relative to how far two seeds of float32 are apart.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.own_commands import metric, run
from checkpoints import load_checkpoint
from modelling.weights import OPTIMIZER
from modelling.weights.optimizer_state import float32_weight
from terminal.entry_point import entry_point
from terminal.parser import Parser, count_option

SEEDS = (1, 2, 3)
CONVERSATIONS = "data/sample/conversations"
CHAT = (
    "--config qwen3_tiny --sequence_length 128 --examples_per_row 4 --global_batch_size 16 "
    f"--micro_batch_size 16 --data.train {CONVERSATIONS}/train.jsonl "
    f"--data.validation {CONVERSATIONS}/validation.jsonl"
).split()
TASKS: Mapping[str, tuple[Sequence[str], str]] = {
    "tiny": (["--config", "tiny"], "accuracy"),
    "gptj_tiny": (["--config", "gptj_tiny"], "accuracy"),
    "qwen3_tiny": (["--config", "qwen3_tiny"], "accuracy"),
    "chat": (CHAT, "exact_match"),
}
"""By name: flags, and what is measured besides the loss."""
WAYS: Mapping[str, Sequence[str]] = {
    "float32": ("--precision", "float32"),
    "compact": (
        *("--precision", "bfloat16", "--training.optimizer.state", "compact"),
        *("--training.gradients", "bfloat16"),
    ),
}


def chat_model(folder: Path) -> Sequence[str]:
    """Make the random model of the chat tutorial, once. Returns the flags that name it."""
    if not (folder / "config.json").exists():
        made = "--config qwen3_tiny --load random --model.vocab_size 640"
        made += " --model.max_position_embeddings 256"
        tokenizer = ("--tokenizer", "data/sample/chat_tokenizer")
        run("run_export.py", *made.split(), *tokenizer, "--save-hf", str(folder))
    return ("--model", str(folder))


def train(task: str, way: str, seed: int, steps: int, out: Path) -> Path:
    """Train and validate, as far as it is not done yet. Returns the run's folder."""
    folder = out / f"{task}-{way}-{seed}"
    flags = [*TASKS[task][0], *(chat_model(out / "model") if task == "chat" else ())]
    if not (folder / "validation.json").exists():
        given = ("--data.seed", str(seed), "--steps", str(steps), "--save", str(folder))
        run("run_finetuning.py", *flags, *WAYS[way], *given)
        run("run_validation.py", "--load", str(folder))
    return folder


def weights(folder: Path) -> dict[str, np.ndarray]:
    """Of the newest step, in float64, with residuals."""
    tensors = load_checkpoint(folder).tensors
    names = [name for name in tensors if not name.startswith(f"{OPTIMIZER}/")]
    return {name: float32_weight(tensors, name).astype(np.float64) for name in names}


def distance(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> float:
    """Euclidean, over all weights together."""
    return float(np.sqrt(sum(np.sum((one[name] - other[name]) ** 2) for name in one)))


def relative_distance(runs: Mapping[tuple[str, int], Path]) -> float:
    """Mean distance of compact from float32 with the same seed, in means of those of two float32
    runs; not a number with one seed."""
    seeds = sorted({seed for _, seed in runs})
    exact = {seed: weights(runs["float32", seed]) for seed in seeds}
    own = mean(distance(weights(runs["compact", s]), exact[s]) for s in seeds)
    pairs = list(itertools.combinations(seeds, 2))
    return own / mean(distance(exact[s], exact[t]) for s, t in pairs) if pairs else float("nan")


def mean(values: Iterable[float]) -> float:
    """Of at least one."""
    return float(np.mean(list(values)))


def row(task: str, seeds: Sequence[int], steps: int, out: Path) -> str:
    """Train a task in all ways with all seeds: its line of the table."""
    runs = {(way, s): train(task, way, s, steps, out) for s in seeds for way in WAYS}
    name = TASKS[task][1]
    losses, scores = (
        {key: metric(folder, one) for key, folder in runs.items()} for one in ("loss", name)
    )
    cells = [task, *_cells(losses, seeds), name, *_cells(scores, seeds)]
    return f"| {' | '.join(cells)} | {relative_distance(runs):.2f} |"


def _cells(values: Mapping[tuple[str, int], float], seeds: Sequence[int]) -> list[str]:
    """For each way the mean, and in parentheses the values."""
    one: Callable[[str], list[float]] = lambda way: [values[way, s] for s in seeds]  # noqa: E731
    return [f"{mean(one(way)):.4f} ({', '.join(f'{v:.4f}' for v in one(way))})" for way in WAYS]


@entry_point()
def main(arguments: Sequence[str] | None = None) -> None:
    """Train, validate and compare."""
    parser = Parser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where runs go")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="of the order of data")
    parser.add_argument("--steps", type=count_option, default=1000)
    given = parser.parse_args(arguments)
    print("| task | loss, float32 | compact | metric | float32 | compact |"
          " distance of weights |")  # fmt: skip
    print("|---" * 7 + "|")
    for task in given.tasks:
        print(row(task, given.seeds, given.steps, given.out), flush=True)


if __name__ == "__main__":
    sys.exit(main())
