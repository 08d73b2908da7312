"""Table of a training step's time by phase of the model, which `--profile` writes."""

from __future__ import annotations

from collections.abc import Sequence

from popxl.timing import RegionTimes, Timing, TimingSums

REST = "no phase"
MAX_SEGMENTS = 10
_LEGEND = """\
Host milliseconds per run of the program; a phase may run many times in one. With overlap, the host
dispatches work ahead of the devices: `dispatch` is the time that takes, `wait` the time the host
waits for them within the phase. Without overlap it waits for each transfer and segment before it
dispatches the next, so every one of them has a time of its own."""
_HEAD = ("phase", "dispatch", "wait", "loads", "ms", "segments", "ms", "stores", "ms", "numbers",
         "serial", "share")  # fmt: skip


def format_phase_table(title: str, overlapped: Timing, serialized: Timing) -> str:
    """Format the table of a training step's time by phase of the model.

    Args:
        title: model and devices that were measured.
        overlapped: timing of normal runs.
        serialized: timing of serialized runs, in which every step waits for the one before.
    """
    rows = [
        _HEAD,
        *(_phase_row(label, overlapped, serialized) for label in serialized.parts),
        _total_row(overlapped, serialized),
    ]
    blocks = [
        title,
        _LEGEND,
        _format_totals(overlapped, serialized),
        _align_columns(rows),
        _slowest_segments(serialized),
    ]
    return "\n\n".join(blocks) + "\n"


def _format_totals(overlapped: Timing, serialized: Timing) -> str:
    dispatch = _total_per_run(overlapped, "seconds")
    wait = _total_per_run(overlapped, "wait_seconds")
    total = overlapped.seconds / overlapped.num_runs
    return "\n".join(
        [
            f"with overlap     {_format_milliseconds(total)} ms: dispatch "
            f"{_format_milliseconds(dispatch)}, wait {_format_milliseconds(wait)}, and "
            f"{_format_milliseconds(total - dispatch - wait)} for inputs, results and the end",
            f"without overlap  {_format_milliseconds(serialized.seconds / serialized.num_runs)} ms",
            f"measured         {overlapped.num_runs} runs with overlap, {serialized.num_runs} "
            "without",
        ]
    )


def _phase_row(label: str, overlapped: Timing, serialized: Timing) -> tuple[str, ...]:
    seen = overlapped.parts.get(label, RegionTimes())
    part, runs = serialized.parts[label], serialized.num_runs
    total = part.seconds + part.wait_seconds
    return (
        label or REST,
        _format_milliseconds(seen.seconds / overlapped.num_runs),
        _format_milliseconds(seen.wait_seconds / overlapped.num_runs),
        *_format_work(part.loads, runs),
        *_format_work(part.runs, runs),
        *_format_work(part.stores, runs),
        _format_milliseconds((part.host_steps.seconds + part.host_steps.wait_seconds) / runs),
        _format_milliseconds(total / runs),
        f"{total / serialized.seconds:.0%}",
    )


def _total_row(overlapped: Timing, serialized: Timing) -> tuple[str, ...]:
    total = _total_per_run(serialized, "seconds") + _total_per_run(serialized, "wait_seconds")
    times = (
        _format_milliseconds(_total_per_run(overlapped, "seconds")),
        _format_milliseconds(_total_per_run(overlapped, "wait_seconds")),
    )
    return (
        "total",
        *times,
        *[""] * 7,
        _format_milliseconds(total),
        f"{total * serialized.num_runs / serialized.seconds:.0%}",
    )


def _total_per_run(timing: Timing, name: str) -> float:
    return sum(getattr(part, name) for part in timing.parts.values()) / timing.num_runs


def _format_work(sums: TimingSums, runs: int) -> tuple[str, str]:
    return f"{sums.count / runs:g}", _format_milliseconds((sums.seconds + sums.wait_seconds) / runs)


def _slowest_segments(serialized: Timing) -> str:
    """Format a table of the slowest of the jitted segments into which the program is divided."""
    slowest = sorted(serialized.segments.items(), key=lambda item: -item[1].seconds)[:MAX_SEGMENTS]
    rows = [
        ("segment", "runs", "ms"),
        *((name, *_format_work(w, serialized.num_runs)) for name, w in slowest),
    ]
    return _align_columns(rows)


def _align_columns(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *rest in rows:
        numbers = (text.rjust(width) for text, width in zip(rest, widths[1:], strict=True))
        lines.append("  ".join([first.ljust(widths[0]), *numbers]).rstrip())
    return "\n".join(lines)


def _format_milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"
