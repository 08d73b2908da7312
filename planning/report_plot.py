"""Plot of a plan: seconds by phase and resource, and device memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from files.atomic_writing import write_file_atomically
from planning.report import PlanReport
from planning.report_text import format_bytes, format_devices

COLORS = {
    "compute": "#1f5fa8",
    "memory": "#6aa84f",
    "host": "#b3541e",
    "network": "#8e63b3",
    "disk": "#7f7f7f",
}
_WIDTH, _MARGIN = 10, 0.15  # inches


def plot_report(report: PlanReport, path: Path) -> None:
    """Plot the times by resource and the memory of each phase to a PNG file.

    Raises:
        WriteError: it cannot be written.
    """
    layout = ConstrainedLayoutEngine(w_pad=_MARGIN, h_pad=_MARGIN)
    figure = Figure(figsize=(_WIDTH, 0.42 * len(report.rows) + 2), dpi=120, layout=layout)
    FigureCanvasAgg(figure)  # no pyplot: nothing global, no display
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[3, 1])
    _plot_times(left, report)
    _plot_memory(right, report)
    figure.suptitle(
        f"{report.preset}, {report.requirements.kind}: {_devices_title(report)}, "
        f"{report.seconds:.3g} s a run, "
        f"{format_bytes(report.plan.host_bytes or report.plan.device_bytes)} "
        f"{'host memory' if report.plan.host_bytes else 'on a device'}",
        x=_MARGIN / _WIDTH, ha="left",
    )  # fmt: skip
    for axes in (left, right):
        axes.grid(axis="x", color="0.9")
        axes.set_axisbelow(True)
        axes.margins(y=0.01)
        axes.spines[["top", "right"]].set_visible(False)
    write_file_atomically("the picture", path, lambda draft: figure.savefig(draft, format="png"))


def _devices_title(report: PlanReport) -> str:
    count = report.plan.replicas
    return f"{count} device{'s' if count > 1 else ''} {format_devices(report)}"


def _plot_times(axes: Axes, report: PlanReport) -> None:
    names = [f"{row.phase} {row.direction}".strip() for row in report.rows]
    positions = np.arange(len(names))
    height = 0.8 / len(COLORS)
    for i, (resource, color) in enumerate(COLORS.items()):
        seconds = [getattr(row.times, resource) * 1e3 for row in report.rows]
        axes.barh(
            positions + (i - (len(COLORS) - 1) / 2) * height,
            seconds,
            height,
            color=color,
            label=resource,
        )
    axes.set_yticks(positions, names)
    axes.invert_yaxis()
    axes.set_xlabel("ms, if nothing else were needed")
    axes.legend(frameon=False, ncols=len(COLORS), loc="lower left", bbox_to_anchor=(0, 1))


def _plot_memory(axes: Axes, report: PlanReport) -> None:
    live = [row.part.device_bytes / 1e6 for row in report.rows]
    axes.barh(np.arange(len(live)), live, 0.6, color="0.55")
    axes.set_xlabel("MB of intermediate values")
