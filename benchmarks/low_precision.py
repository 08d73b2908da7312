"""Measure how training in lower precision changes losses, metrics and weights.

    python3 -m benchmarks.low_precision updates --steps 80
    python3 -m benchmarks.low_precision state --out runs/state
    python3 -m benchmarks.low_precision fp8 --out runs/fp8 --tasks tiny --seeds 42

- `updates` trains a preset in this process with each form of weights and optimizer state, from the
  same weights on the same batches at a constant learning rate. Prints the mean loss of the last
  steps, the distance of the weights' change from float32's, relative to it, and the fraction of
  weights that changed.
- `state` trains tasks to the end with float32 and with 8-bit optimizer state; seeds set the order
  of the samples, the initial weights are equal. Prints means and each seed's value, and how far the
  final weights are from float32's, relative to the distance of two float32 seeds.
- `fp8` trains presets with products in float32 and in FP8; seeds set weights and order. Prints
  accuracies, and draws the losses into `fp8.png`.

`state` and `fp8` run run_finetuning.py and run_validation.py in folders of `--out`; a run that is
complete there is not repeated.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import read_metric, run_script
from checkpoints import load_checkpoint
from config.errors import UserError
from config.families import load_finetuning_config
from config.presets import merge_over
from config.sections import RunConfig
from data.loader import Loader
from data.pipeline import Pipeline
from modelling.model_family import get_family
from modelling.weights import OPTIMIZER_PREFIX
from modelling.weights.optimizer_state import float32_weight
from sessions.session import compile_session
from sessions.training import TrainingSession
from terminal.entry_point import entry_point
from terminal.parser import Parser, parse_count_option

Tensors = Mapping[str, np.ndarray]


def full_weights(tensors: Tensors) -> dict[str, np.ndarray]:
    """Returns a checkpoint's weights in float64, with their float32 master copies or residuals."""
    names = [name for name in tensors if not name.startswith(f"{OPTIMIZER_PREFIX}/")]
    return {name: float32_weight(tensors, name).astype(np.float64) for name in names}


def weights_distance(weights: Tensors, other_weights: Tensors) -> float:
    """Returns the Euclidean distance of two models' weights, over all tensors together."""
    return float(
        np.sqrt(sum(np.sum((weights[name] - other_weights[name]) ** 2) for name in weights))
    )


# ---- updates: a few steps in this process ------------------------------------------------------
EIGHT_BITS = {"training": {"optimizer": {"state": "8bit_residual8"}, "gradient_dtype": "bfloat16"}}
FORMS: Mapping[str, Mapping[str, Any]] = {
    "float32": {},
    "bfloat16, to nearest": {"training": {"stochastic_rounding": False}},
    "bfloat16, stochastically": {"training": {"stochastic_rounding": True}},
    "bfloat16, float32 masters": {"execution": {"master_weights": True}},
    "float32, moments in bfloat16": {"training": {"optimizer": {"state": "bfloat16"}}},
    "float32, 8bit_residual8": {"training": {"optimizer": {"state": "8bit_residual8"}}},
    "bfloat16, 8bit_residual8": EIGHT_BITS,
    "bfloat16, 8bit_residual16": merge_over(
        EIGHT_BITS, {"training": {"optimizer": {"state": "8bit_residual16"}}}
    ),
}
"""By name, which begins with the precision: changes of the preset."""
LAST_STEPS = 30


@dataclass(frozen=True)
class UpdateResult:
    """Mean loss of the last training steps, and the weights before and after training."""

    loss: float
    initial: Tensors
    final: Tensors

    @property
    def changed_fraction(self) -> float:
        """Fraction of the weights whose values training changed."""
        changed = sum(np.count_nonzero(w != self.initial[n]) for n, w in self.final.items())
        return changed / sum(w.size for w in self.final.values())

    def relative_error(self, exact: UpdateResult) -> float:
        """Relative L2 error of the weights' change, compared with that of the result `exact`."""
        changes = [{n: r.final[n] - r.initial[n] for n in r.final} for r in (self, exact)]
        return weights_distance(*changes) / weights_distance(exact.final, exact.initial)


def config_with_state_form(preset: str, state_form: str, batch: int, seed: int) -> RunConfig:
    """Returns a preset's one-device configuration with a form of optimizer state from `FORMS`."""
    common = {
        "model": {"precision": state_form.partition(",")[0], "seed": seed},
        "training": {"global_batch_size": batch},
        "execution": {"micro_batch_size": batch, "data_parallel": 1, "tensor_parallel": 1},
    }
    return load_finetuning_config(preset, merge_over(common, FORMS[state_form]))


def train_steps(config: RunConfig, steps: int, lr: float) -> UpdateResult:
    """Train a model from its configured random weights at a constant learning rate."""
    family = get_family(config)
    data = Pipeline(config, family.sample_format)
    loader = Loader.from_config(config, data.make_training_samples())
    model = compile_session(lambda: TrainingSession(data.config), "the training program")
    model.write(family.weight_map(config).init_weights(config.model.seed))
    with model:
        initial = full_weights(model.tensors())
        losses = [model.run([loader.next_batch()], [lr], step)[0].loss for step in range(steps)]
        final = full_weights(model.tensors())
    return UpdateResult(float(np.mean(losses[-LAST_STEPS:])), initial, final)


def compare_updates(args: argparse.Namespace) -> None:
    """Train a preset with each precision of optimizer state, and print a table of their effects."""
    print("| weights | loss | distance from float32's change | weights changed |")
    print("|---|---|---|---|")
    results: dict[str, UpdateResult] = {}
    for form in FORMS:
        config = config_with_state_form(args.config, form, args.batch, args.seeds[0])
        result = results[form] = train_steps(config, args.steps, args.lr)
        error = result.relative_error(results["float32"])
        print(f"| {form} | {result.loss:.4f} | {error:.1%} | {result.changed_fraction:.1%} |")


# ---- state and fp8: whole runs -----------------------------------------------------------------
CONVERSATIONS = "data/sample/conversations"
CHAT = (
    "--config qwen3_tiny --sequence_length 128 --examples_per_sample 4 --global_batch_size 16 "
    f"--micro_batch_size 16 --data.train {CONVERSATIONS}/train.jsonl "
    f"--data.validation {CONVERSATIONS}/validation.jsonl"
).split()
TASKS: Mapping[str, tuple[Sequence[str], str]] = {
    "tiny": (["--config", "tiny"], "accuracy"),
    "gptj_tiny": (["--config", "gptj_tiny"], "accuracy"),
    "qwen3_tiny": (["--config", "qwen3_tiny"], "accuracy"),
    "chat": (CHAT, "exact_match"),
}
"""By name: flags, and the metric."""
STATES: Mapping[str, Sequence[str]] = {
    "float32": ("--precision", "float32"),
    "8bit": (
        *("--precision", "bfloat16", "--training.optimizer.state", "8bit_residual8"),
        *("--training.gradient_dtype", "bfloat16"),
    ),
}


def create_chat_model(folder: Path) -> Sequence[str]:
    """Export the random model of the chat tutorial if missing; returns the flags that load it."""
    if not (folder / "config.json").exists():
        flags = "--config qwen3_tiny --load random --model.vocab_size 640"
        flags += " --model.max_position_embeddings 256 --tokenizer data/sample/chat_tokenizer"
        run_script("run_export.py", *flags.split(), "--save-hf", str(folder))
    return ("--model", str(folder))


def train_run(folder: Path, flags: Sequence[str], *validation_flags: str) -> Path:
    """Train and validate a configuration unless its run is complete; returns the run folder."""
    if not (folder / "eval.json").exists():
        run_script("run_finetuning.py", *flags, "--save", str(folder), "--run-dir", str(folder))
        run_script("run_validation.py", "--load", str(folder), *validation_flags)
    return folder


def compare_states(args: argparse.Namespace) -> None:
    """Train tasks with float32 and 8-bit optimizer state, and print a table."""
    print("| task | loss, float32 | 8-bit | metric | float32 | 8-bit | distance of weights |")
    print("|---" * 7 + "|")
    for task in args.tasks or TASKS:
        flags, metric = TASKS[task]
        model = create_chat_model(args.out / "model") if task == "chat" else ()
        steps = ("--steps", str(args.steps))
        runs = {
            (state, seed): train_run(
                args.out / f"{task}-{state}-{seed}",
                [*flags, *model, *STATES[state], "--data.seed", str(seed), *steps],
            )
            for seed in args.seeds
            for state in STATES
        }
        cells = [task, *_format_means(runs, "loss"), metric, *_format_means(runs, metric)]
        print(f"| {' | '.join(cells)} | {_relative_distance(runs):.2f} |", flush=True)


def _format_means(runs: Mapping[tuple[str, int], Path], metric: str) -> list[str]:
    """Returns the mean of a metric over seeds for each optimizer state, with each seed's value."""
    values = {
        state: [read_metric(folder, metric) for (of, _), folder in runs.items() if of == state]
        for state in STATES
    }
    return [f"{_mean(v):.4f} ({', '.join(f'{one:.4f}' for one in v)})" for v in values.values()]


def _relative_distance(runs: Mapping[tuple[str, int], Path]) -> float:
    """Returns the distance of weights trained with 8-bit and float32 state, in units of seed noise.

    It is the mean over equal seeds, divided by the mean distance of two float32 runs; NaN with
    one seed.
    """
    weights = {key: full_weights(load_checkpoint(folder).tensors) for key, folder in runs.items()}
    seeds = sorted({seed for _, seed in runs})
    pairs = list(itertools.combinations(seeds, 2))
    if not pairs:
        return float("nan")
    between_states = _mean(
        weights_distance(weights["8bit", s], weights["float32", s]) for s in seeds
    )
    between_seeds = _mean(
        weights_distance(weights["float32", s], weights["float32", t]) for s, t in pairs
    )
    return between_states / between_seeds


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def compare_fp8(args: argparse.Namespace) -> None:
    """Train presets in float32 and FP8, print accuracies and plot the losses."""
    print("| preset | seed | float32 | FP8 | FP8, validated in FP8 |\n" + "|---" * 5 + "|")
    losses: dict[tuple[str, str, int], list[float]] = {}
    for seed, task in itertools.product(args.seeds, args.tasks or ("tiny", "gptj_tiny")):
        common = ["--config", task, "--seed", str(seed)]
        cells = [task, str(seed)]
        for products, flags in (("float32", []), ("FP8", ["--fp8.enabled"])):
            folder = train_run(args.out / f"{task}-{seed}-{products.lower()}", [*common, *flags])
            cells.append(f"{read_metric(folder, 'accuracy'):.4f}")
            lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            rows = map(json.loads, lines)
            losses[task, products, seed] = [row["loss"] for row in rows if "loss" in row]
        in_fp8 = folder / "in_fp8"
        if not (in_fp8 / "eval.json").exists():
            out = ("--fp8.enabled", "--out", str(in_fp8))
            run_script("run_validation.py", *common, "--load", str(folder), *out)
        cells.append(f"{read_metric(in_fp8, 'accuracy'):.4f}")
        print(f"| {' | '.join(cells)} |", flush=True)
    draw_losses(losses, args.out / "fp8.png")


def draw_losses(losses: Mapping[tuple[str, str, int], Sequence[float]], path: Path) -> None:
    """Plot loss curves, smoothed over 20 steps, with a panel for each preset.

    Args:
        losses: of each step, by preset, products ("float32" or "FP8") and seed.
    """
    from matplotlib.figure import Figure

    presets = list(dict.fromkeys(preset for preset, _, _ in losses))
    first_seed = min(seed for _, _, seed in losses)
    figure = Figure(figsize=(5 * len(presets), 3.6), layout="constrained")
    panels = figure.subplots(1, len(presets), squeeze=False)[0]
    for panel, preset in zip(panels, presets, strict=True):
        for (_, products, seed), values in (x for x in losses.items() if x[0][0] == preset):
            smooth = np.convolve(values, np.full(20, 1 / 20), "valid")
            label = products if seed == first_seed else None
            dashed = products == "FP8"
            style = {"color": "C1", "linestyle": "--"} if dashed else {"color": "C0"}
            panel.plot(np.arange(len(smooth)) + 20, smooth, linewidth=1, label=label, **style)
        panel.set(title=preset, xlabel="step", ylabel="loss", yscale="log")
        panel.legend()
    figure.savefig(path, dpi=120)


COMPARISONS = {"updates": compare_updates, "state": compare_states, "fp8": compare_fp8}
SEEDS = {"updates": [42], "state": [1, 2, 3], "fp8": [42, 43, 44]}
STEPS = {"updates": 150, "state": 1000}


@entry_point(single_process=True)
def main(arguments: Sequence[str] | None = None) -> None:
    """Run one of the comparisons of low-precision training."""
    parser = Parser.of_script(__doc__)
    parser.add_argument("comparison", choices=COMPARISONS)
    parser.add_argument("--out", type=Path, metavar="DIR", help="state, fp8: folder of the runs")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, help="state, fp8: by default all")
    parser.add_argument("--seeds", type=int, nargs="+", help="updates: the first one is used")
    parser.add_argument("--steps", type=parse_count_option, help="updates (150), state (1000)")
    parser.add_argument("--config", default="tiny", metavar="PRESET", help="updates: the preset")
    parser.add_argument(
        "--batch", type=parse_count_option, default=32, help="updates: samples of a step"
    )
    parser.add_argument("--lr", type=float, default=1e-5, help="updates: learning rate")
    args = parser.parse_args(arguments)
    if args.out is None and args.comparison != "updates":
        raise UserError(f"{args.comparison} needs a folder for its runs: give --out DIR")
    args.seeds = args.seeds or SEEDS[args.comparison]
    args.steps = args.steps or STEPS.get(args.comparison)
    COMPARISONS[args.comparison](args)


if __name__ == "__main__":
    sys.exit(main())
