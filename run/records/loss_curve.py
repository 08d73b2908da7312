"""Plot of a run's loss, learning rate and some metrics of its objective by step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from files.atomic_writing import write_file_atomically
from run.records.metrics_jsonl import StepMetrics, metric_values

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOSS_COLOR, LR_COLOR, EVAL_COLOR = "#1f5fa8", "#b3541e", "#2c7a4b"
EVAL_LOSS = "eval_loss"
PANELS = {
    "reward": {
        "rewards/chosen": EVAL_COLOR,
        "rewards/rejected": LR_COLOR,
        "rewards/margins": LOSS_COLOR,
    },
    "nats": {"entropy": EVAL_COLOR, "kl": LOSS_COLOR},
}
"""Panels between loss and learning rate, by the name of their axis: metrics and their colors.

A run has the panels of whose metrics it has the first.
"""

PLOTTED_METRICS = (
    *("step", "loss", "learning_rate", EVAL_LOSS),
    *(name for colors in PANELS.values() for name in colors),
)
MAX_LINEAR = 5.0
"""Ratio of the largest to the smallest loss above which the axis is logarithmic."""


def draw_loss_curve(steps_metrics: Sequence[StepMetrics], path: Path, title: str) -> None:
    """Plot metrics with `step`, `loss` and `learning_rate` to a PNG file.

    Raises:
        WriteError: the file cannot be written.
    """
    # It takes a second, which no run that stops early should wait for.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)  # pyplot has global state and needs a display
    known = {name for row in steps_metrics for name in row}
    panels = {label: colors for label, colors in PANELS.items() if next(iter(colors)) in known}
    heights = [3, *[2] * len(panels), 1]
    above, *between, below = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
    steps = metric_values(steps_metrics, "step")
    _draw_loss(above, steps_metrics, steps)
    for axes, (label, colors) in zip(between, panels.items(), strict=True):
        axes.set_ylabel(label)
        for name, color in colors.items():
            if name in known:
                values = metric_values(steps_metrics, name)
                axes.plot(steps, values, color=color, linewidth=1.5, label=name)
        axes.legend(frameon=False)
    above.set_title(title, loc="left")
    below.plot(steps, metric_values(steps_metrics, "learning_rate"), color=LR_COLOR, linewidth=1.5)
    below.set_ylabel("learning rate")
    below.set_ylim(bottom=0)
    below.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    below.set_xlabel("optimizer step")
    for axes in (above, *between, below):
        axes.grid(color="0.9")
        axes.spines[["top", "right"]].set_visible(False)
    write_file_atomically("the loss curve", path, lambda draft: figure.savefig(draft, format="png"))


def centered_mean(values: Sequence[float], span: float) -> np.ndarray:
    """Return the centered moving average over about `span` values, float64 of the same length.

    The window narrows towards both ends. Values that are not finite are ignored; a window without
    finite values gives nan.
    """
    array = np.asarray(values, np.float64)
    finite = np.isfinite(array)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, array, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    index = np.arange(len(array))
    half_window = np.minimum(np.minimum(index, len(array) - 1 - index), int(max(1.0, span) // 2))
    first, last = index - half_window, index + half_window + 1
    number = counts[last] - counts[first]
    total = sums[last] - sums[first]
    return np.divide(total, number, out=np.full(len(array), np.nan), where=number > 0)


def _draw_loss(axes: Axes, steps_metrics: Sequence[StepMetrics], steps: Sequence[float]) -> None:
    losses = metric_values(steps_metrics, "loss")
    axes.plot(steps, losses, color=LOSS_COLOR, alpha=0.3, linewidth=1, label="loss of a step")
    smoothed = centered_mean(losses, len(losses) / 25)
    axes.plot(steps, smoothed, color=LOSS_COLOR, linewidth=2, label="smoothed")
    evaluated = [row for row in steps_metrics if EVAL_LOSS in row]
    if evaluated:
        eval_steps = metric_values(evaluated, "step")
        eval_losses = metric_values(evaluated, EVAL_LOSS)
        axes.plot(
            eval_steps,
            eval_losses,
            color=EVAL_COLOR,
            marker="o",
            markersize=4,
            label="validation",
        )
    axes.set_ylabel("loss")
    positive = [loss for loss in losses if np.isfinite(loss) and loss > 0]
    if len(positive) == len(losses) and max(positive) > MAX_LINEAR * min(positive):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
    elif all(loss >= 0 for loss in losses if np.isfinite(loss)):
        axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
