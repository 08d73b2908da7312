"""Accuracy and losses of training in FP8 and in float32: the demo presets, with several seeds.

    python3 -m benchmarks.fp8 --out runs/fp8
    python3 -m benchmarks.fp8 --out runs/fp8 --presets tiny --seeds 1

Each run trains with run_finetuning.py and validates with run_validation.py. What is done is kept in
the folder and not done again. Ends with a table, `fp8.json` and the picture `fp8.png`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.own_commands import metric, run
from files.atomic_writing import write_text
from terminal.entry_point import entry_point
from terminal.parser import Parser

SEEDS = (42, 43, 44)
FP8 = "--fp8.enabled"
KEEP = ("--activations", "keep")  # the same bits as with recomputation, sooner


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        accuracy: on the validation set, with products in float32.
        fp8_accuracy: generated in FP8; None for a run in float32.
        losses: of the steps.
    """

    preset: str
    seed: int
    fp8: bool
    accuracy: float
    fp8_accuracy: float | None
    losses: list[float]


def train(preset: str, seed: int, fp8: bool, folder: Path) -> Run:
    """Train and validate, as far as it is not done yet."""
    path = folder / f"{preset}-{seed}-{'fp8' if fp8 else 'float32'}"
    common, flags = ["--config", preset, "--seed", str(seed)], [FP8] if fp8 else []
    if not (path / "validation.json").exists():
        save = ["--save", str(path), "--run-dir", str(path)]
        run("run_finetuning.py", *common, *flags, *KEEP, *save)
        run("run_validation.py", *common, "--load", str(path), "--out", str(path))
    in_fp8 = path / "in_fp8"
    if fp8 and not (in_fp8 / "validation.json").exists():
        run("run_validation.py", *common, FP8, "--load", str(path), "--out", str(in_fp8))
    records = (path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return Run(
        preset,
        seed,
        fp8,
        metric(path, "accuracy"),
        metric(in_fp8, "accuracy") if fp8 else None,
        [json.loads(line)["loss"] for line in records],
    )


def table(runs: Sequence[Run]) -> str:
    """A line for each preset and seed."""
    lines = ["| preset | seed | float32 | FP8 | FP8, validated in FP8 |", "| --- " * 5 + "|"]
    done = {(r.preset, r.seed, r.fp8): r for r in runs}
    for (preset, seed, fp8), eight in done.items():
        if fp8:
            wide = done[preset, seed, False]
            lines.append(
                f"| {preset} | {seed} | {wide.accuracy:.4f} | {eight.accuracy:.4f} "
                f"| {eight.fp8_accuracy:.4f} |"
            )
    return "\n".join(lines)


def draw(runs: Sequence[Run], path: Path) -> None:
    """The loss curves, smoothed over 20 steps: a panel for each preset."""
    import numpy as np
    from matplotlib.figure import Figure

    presets = list(dict.fromkeys(r.preset for r in runs))
    figure = Figure(figsize=(5 * len(presets), 3.6), layout="constrained")
    panels = figure.subplots(1, len(presets), squeeze=False)[0]
    for panel, preset in zip(panels, presets, strict=True):
        for r in (r for r in runs if r.preset == preset):
            smooth = np.convolve(r.losses, np.full(20, 1 / 20), "valid")
            first = r.seed == min(x.seed for x in runs)
            label = ("FP8" if r.fp8 else "float32") if first else None
            style = {"color": "C1", "linestyle": "--"} if r.fp8 else {"color": "C0"}
            panel.plot(np.arange(len(smooth)) + 20, smooth, linewidth=1, label=label, **style)
        panel.set(title=preset, xlabel="step", ylabel="loss", yscale="log")
        panel.legend()
    figure.savefig(path, dpi=120)


@entry_point()
def main(arguments: Sequence[str] | None = None) -> None:
    """Train, validate and compare."""
    parser = Parser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where runs go")
    parser.add_argument("--presets", nargs="+", default=["tiny", "gptj_tiny"])
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    given = parser.parse_args(arguments)
    runs = [
        train(preset, seed, fp8, given.out)
        for seed in given.seeds
        for preset in given.presets
        for fp8 in (False, True)
    ]
    draw(runs, given.out / "fp8.png")
    write_text("the runs", given.out / "fp8.json", json.dumps([asdict(r) for r in runs]) + "\n")
    print(table(runs))


if __name__ == "__main__":
    sys.exit(main())
