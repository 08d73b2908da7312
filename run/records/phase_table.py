"""The table of time by phase that `--profile` writes."""

from __future__ import annotations

from collections.abc import Sequence

from popxl.session import PartTimes, Timing, TimingSums

REST = "no phase"
MAX_SEGMENTS = 10
_LEGEND = """\
Host milliseconds per run of the program; a phase may run many times in one. With overlap, the host
dispatches work ahead of the devices: `dispatch` is the time that takes, `wait` the time the host
waits for them within the phase. Without overlap it waits for each transfer and segment before it
dispatches the next, so every one of them has a time of its own."""
_HEAD = ("phase", "dispatch", "wait", "loads", "ms", "segments", "ms", "stores", "ms", "numbers",
         "serial", "share")  # fmt: skip


def phase_table(title: str, running: Timing, apart: Timing) -> str:
    """The table as text.

    Args:
        title: what was measured, and on what.
        running: of ordinary runs.
        apart: of runs in which every step waits for the one before.
    """
    rows = [_HEAD, *(_row(label, running, apart) for label in apart.parts), _sum(running, apart)]
    blocks = [title, _LEGEND, _whole(running, apart), _aligned(rows), _slowest(apart)]
    return "\n\n".join(blocks) + "\n"


def _whole(running: Timing, apart: Timing) -> str:
    dispatch, wait = _total(running, "seconds"), _total(running, "wait_seconds")
    whole = running.seconds / running.num_runs
    return "\n".join(
        [
            f"with overlap     {_ms(whole)} ms: dispatch {_ms(dispatch)}, wait {_ms(wait)}, and "
            f"{_ms(whole - dispatch - wait)} for inputs, results and the end",
            f"without overlap  {_ms(apart.seconds / apart.num_runs)} ms",
            f"measured         {running.num_runs} runs with overlap, {apart.num_runs} without",
        ]
    )


def _row(label: str, running: Timing, apart: Timing) -> tuple[str, ...]:
    seen = running.parts.get(label, PartTimes())
    part, runs = apart.parts[label], apart.num_runs
    own = part.seconds + part.wait_seconds
    return (
        label or REST,
        _ms(seen.seconds / running.num_runs),
        _ms(seen.wait_seconds / running.num_runs),
        *_counted(part.loads, runs),
        *_counted(part.runs, runs),
        *_counted(part.stores, runs),
        _ms((part.host_steps.seconds + part.host_steps.wait_seconds) / runs),
        _ms(own / runs),
        f"{own / apart.seconds:.0%}",
    )


def _sum(running: Timing, apart: Timing) -> tuple[str, ...]:
    own = _total(apart, "seconds") + _total(apart, "wait_seconds")
    shown = (_ms(_total(running, "seconds")), _ms(_total(running, "wait_seconds")))
    return ("total", *shown, *[""] * 7, _ms(own), f"{own * apart.num_runs / apart.seconds:.0%}")


def _total(timing: Timing, name: str) -> float:
    return sum(getattr(part, name) for part in timing.parts.values()) / timing.num_runs


def _counted(sums: TimingSums, runs: int) -> tuple[str, str]:
    return f"{sums.count / runs:g}", _ms((sums.seconds + sums.wait_seconds) / runs)


def _slowest(apart: Timing) -> str:
    """The segments that take most of the time."""
    slowest = sorted(apart.segments.items(), key=lambda item: -item[1].seconds)[:MAX_SEGMENTS]
    rows = [
        ("segment", "runs", "ms"),
        *((name, *_counted(w, apart.num_runs)) for name, w in slowest),
    ]
    return _aligned(rows)


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *rest in rows:
        numbers = (text.rjust(width) for text, width in zip(rest, widths[1:], strict=True))
        lines.append("  ".join([first.ljust(widths[0]), *numbers]).rstrip())
    return "\n".join(lines)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"
