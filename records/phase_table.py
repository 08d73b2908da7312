"""The table of time by phase that `--profile` writes."""

from __future__ import annotations

from collections.abc import Sequence

from popxl.session import PartTimes, Timing, Work

REST = "no phase"
MOST_SEGMENTS = 10
_LEGEND = """\
Milliseconds of a run of the program, on the host's clock; a phase's own run many times in one.
As it runs, the host asks for work ahead of the devices: `asking` is what that takes, `waiting` what
it waits for them within the phase. Apart, it waits for every transfer and segment before the next:
each has its own time, and nothing overlaps."""
_HEAD = ("phase", "asking", "waiting", "loads", "ms", "segments", "ms", "stores", "ms", "numbers",
         "apart", "share")  # fmt: skip


def phase_table(title: str, running: Timing, apart: Timing) -> str:
    """The table as text.

    Args:
        title: what was measured, and on what.
        running: of runs as they are.
        apart: of runs in which every step waits for the one before.
    """
    rows = [_HEAD, *(_row(label, running, apart) for label in apart.parts), _sum(running, apart)]
    blocks = [title, _LEGEND, _whole(running, apart), _aligned(rows), _slowest(apart)]
    return "\n\n".join(blocks) + "\n"


def _whole(running: Timing, apart: Timing) -> str:
    asking, waiting = _total(running, "seconds"), _total(running, "waiting")
    whole = running.seconds / running.programs
    return "\n".join(
        [
            f"as it runs  {_ms(whole)} ms: asking {_ms(asking)}, waiting {_ms(waiting)}, and "
            f"{_ms(whole - asking - waiting)} for inputs, results and the end",
            f"apart       {_ms(apart.seconds / apart.programs)} ms",
            f"measured    {running.programs} runs as they are, {apart.programs} apart",
        ]
    )


def _row(label: str, running: Timing, apart: Timing) -> tuple[str, ...]:
    seen = running.parts.get(label, PartTimes())
    part, runs = apart.parts[label], apart.programs
    own = part.seconds + part.waiting
    return (
        label or REST,
        _ms(seen.seconds / running.programs),
        _ms(seen.waiting / running.programs),
        *_counted(part.loads, runs),
        *_counted(part.runs, runs),
        *_counted(part.stores, runs),
        _ms((part.rest.seconds + part.rest.waiting) / runs),
        _ms(own / runs),
        f"{own / apart.seconds:.0%}",
    )


def _sum(running: Timing, apart: Timing) -> tuple[str, ...]:
    own = _total(apart, "seconds") + _total(apart, "waiting")
    shown = (_ms(_total(running, "seconds")), _ms(_total(running, "waiting")))
    return ("all", *shown, *[""] * 7, _ms(own), f"{own * apart.programs / apart.seconds:.0%}")


def _total(timing: Timing, name: str) -> float:
    return sum(getattr(part, name) for part in timing.parts.values()) / timing.programs


def _counted(work: Work, runs: int) -> tuple[str, str]:
    return f"{work.count / runs:g}", _ms((work.seconds + work.waiting) / runs)


def _slowest(apart: Timing) -> str:
    """The segments that take most of the time."""
    found = sorted(apart.segments.items(), key=lambda item: -item[1].seconds)[:MOST_SEGMENTS]
    rows = [("segment", "runs", "ms"), *((name, *_counted(w, apart.programs)) for name, w in found)]
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
