"""Figure of the cost of many processes besides compute: seconds, messages and bytes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from imgs.style import ACTIVATION, COMPUTE, GRADIENT, MOMENT, WEIGHT, Area, BoxStyle, Canvas

RECORDS = Path(__file__).parents[2] / "benchmarks" / "results" / "growth.jsonl"
LAST = 1024
LEFT, TOP, WIDTH, HEIGHT, APART = 58, 46, 192, 190, 276  # of a panel, pixels
GRID = "#e3e7eb"

Points = Sequence[tuple[float, float]]


class Series(NamedTuple):
    """A curve of the plot: measured points, and points that extrapolate them."""

    meaning: str
    style: BoxStyle
    measured: Points
    computed: Points = ()


def read_records() -> list[dict[str, float]]:
    """Read the record of `benchmarks.scaling`."""
    return [json.loads(line) for line in RECORDS.read_text(encoding="utf-8").splitlines()]


def draw() -> Canvas:
    entries = read_records()
    canvas = Canvas(TOP + HEIGHT + 112)
    panels = (
        ("seconds", _seconds_series(entries), ("0.001", "0.01", "0.1", "1", "10", "100")),
        ("messages of a step", _message_series(entries), ("1", "10", "100", "1,000", "10,000")),
        ("bytes", _byte_series(entries), ("100", "10 kB", "1 MB", "100 MB", "10 GB")),
    )
    for i, (title, series, ticks) in enumerate(panels):
        _draw_panel(canvas, LEFT + i * APART, title, series, ticks)
    about = "over the number of processes; of\ntables, of hosts with 8 devices.\nDashed: computed"
    canvas.note((LEFT + APART - 46, TOP + HEIGHT + 78), about, "left")
    return canvas


def _seconds_series(entries: Sequence[Mapping[str, float]]) -> list[Series]:
    return [
        Series("start: all have met", WEIGHT, _measured_points(entries, "meet_s")),
        Series("save", MOMENT, _measured_points(entries, "save_s")),
        Series("exchanges of a step", COMPUTE, _measured_points(entries, "step_s")),
    ]


def _message_series(entries: Sequence[Mapping[str, float]]) -> list[Series]:
    return [_training_step_series(entries, "messages")]


def _byte_series(entries: Sequence[Mapping[str, float]]) -> list[Series]:
    listed = [row for row in entries if "hosts" in row]
    needed = [(r["hosts"], r["table_bytes"] * r["tables_needed"] + r["manifest_bytes"])
              for r in listed]  # fmt: skip
    return [
        _training_step_series(entries, "bytes"),
        Series("all tables of xxl_pod64", ACTIVATION, (),
               [(row["hosts"], row["tables_bytes"]) for row in listed]),
        Series("what a host loads of them", GRADIENT, (), needed),
    ]  # fmt: skip


def _training_step_series(entries: Sequence[Mapping[str, float]], name: str) -> Series:
    measured = _measured_points(entries, name)
    (last,) = (row[name] for row in entries if row.get("processes") == LAST)
    return Series("exchanges of a step", COMPUTE, measured, [measured[-1], (LAST, last)])


def _measured_points(
    entries: Sequence[Mapping[str, float]], name: str
) -> list[tuple[float, float]]:
    rows = [row for row in entries if 1 < row.get("processes", 0) < LAST and name in row]
    return [(row["processes"], row[name]) for row in rows]


def _draw_panel(
    canvas: Canvas, left: float, title: str, series: Sequence[Series], ticks: Sequence[str]
) -> None:
    """Draw one plot with logarithmic axes; `ticks` are axis labels from bottom to top."""
    low, high = (math.log10(_parse_tick(ticks[i])) for i in (0, -1))
    bottom = TOP + HEIGHT

    def place(point: tuple[float, float]) -> tuple[float, float]:
        count, value = point
        height = (math.log10(value) - low) / (high - low)
        return left + WIDTH * math.log2(count) / math.log2(LAST), bottom - HEIGHT * height

    canvas.head((left - 46, 18), title)
    for i, tick in enumerate(ticks):
        y = bottom - HEIGHT * i / (len(ticks) - 1)
        canvas.arrow((left, y), (left + WIDTH, y), colour=GRID, head=False)
        canvas.note((left - 6, y), tick, "right")
    for count in (2, 8, 64, LAST):
        canvas.note((place((count, 10**low))[0], bottom + 14), f"{count:,}")
    for one in series:
        if one.computed:
            canvas.curve([place(point) for point in one.computed], one.style, dashed=True)
        if one.measured:
            canvas.curve([place(point) for point in one.measured], one.style)
    for i, one in enumerate(series):
        y = bottom + 38 + 20 * i
        canvas.box(Area(left - 46, y - 7, 20, 14), style=one.style)
        canvas.note((left - 19, y), one.meaning, "left")


def _parse_tick(tick: str) -> float:
    """Returns the number that the label of an axis tick shows."""
    digits, _, unit = tick.replace(",", "").partition(" ")
    return float(digits) * {"": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}[unit]
