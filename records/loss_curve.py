"""The picture of a run: loss and learning rate over the steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from files.writing import write_file
from records.metrics import Row, column

LOSS_COLOUR, RATE_COLOUR = "#1f5fa8", "#b3541e"


def draw_loss_curve(rows: Sequence[Row], path: Path, title: str) -> None:
    """Draw rows with `step`, `loss` and `learning_rate` into a PNG file.

    Raises:
        WriteError: it cannot be written.
    """
    figure = Figure(figsize=(8, 6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)  # no pyplot: nothing global, no display
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    steps = column(rows, "step")
    _draw_loss(above, steps, column(rows, "loss"))
    above.set_title(title, loc="left")
    below.plot(steps, column(rows, "learning_rate"), color=RATE_COLOUR, linewidth=1.5)
    below.set_ylabel("learning rate")
    below.set_ylim(bottom=0)
    below.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    below.set_xlabel("optimizer step")
    for axes in (above, below):
        axes.grid(color="0.9")
        axes.spines[["top", "right"]].set_visible(False)
    write_file("the loss curve", path, lambda draft: figure.savefig(draft, format="png"))


def smooth(values: Sequence[float], span: float) -> np.ndarray:
    """Exponential moving average over about `span` values, float64 of the same length.

    The weights of the values so far add up to one, so that the start is not drawn towards zero. A
    value that is not finite counts for nothing.
    """
    decay = 1.0 - 1.0 / max(1.0, span)
    total = weight = 0.0
    averages = np.full(len(values), np.nan)
    for index, value in enumerate(values):
        total, weight = total * decay, weight * decay
        if np.isfinite(value):
            total, weight = total + value, weight + 1.0
        if weight:
            averages[index] = total / weight
    return averages


def _draw_loss(axes: Axes, steps: Sequence[float], losses: Sequence[float]) -> None:
    span = max(1.0, len(losses) / 50)
    axes.plot(steps, losses, color=LOSS_COLOUR, alpha=0.3, linewidth=1, label="loss of a step")
    axes.plot(steps, smooth(losses, span), color=LOSS_COLOUR, linewidth=2, label="smoothed")
    axes.set_ylabel("loss")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
