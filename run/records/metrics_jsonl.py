"""Read and write metrics.jsonl: one JSON object for each optimizer step."""

from __future__ import annotations

import errno
import json
import math
import os
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from config.errors import UserNotice
from files.atomic_writing import wrap_write_errors, write_file_atomically
from files.errors import FileError
from files.formatting import format_path
from files.json_files import parse_json
from files.text_files import decode_text

StepMetrics = dict[str, float]
PredictionSample = Mapping[str, str]
"""Prediction during training: prompt, generated, expected."""
SAMPLES = "samples"
"""Key of predictions in a line, the only one without a numeric value."""


class MetricsFile:
    """Appends metrics to metrics.jsonl; reopened for each step, so that readers see full lines."""

    def __init__(self, path: Path, first_step: int = 0) -> None:
        """Prepare the file for a run that resumes at `first_step`.

        Metrics of later steps are dropped, as the resumed run writes them again. Damaged lines are
        moved to a file next to it, with a warning.

        Raises:
            WriteError: the file cannot be written.
        """
        damaged: list[bytes] = []

        def write(draft: Path) -> None:
            with draft.open("wb") as file:
                for metrics, line in _read_lines(path):
                    if metrics is None:
                        damaged.append(line)
                    elif metrics["step"] <= first_step:
                        file.write(line)
            if damaged:
                _move_damaged(path, damaged)

        write_file_atomically("the metrics", path, write)
        self._path = path

    def append(
        self, metrics: Mapping[str, float], samples: Sequence[PredictionSample] = ()
    ) -> None:
        """Append the metrics of a training step, which include `step`, atomically to the file.

        Args:
            samples: predictions of an evaluation, for the key `samples`.

        Raises:
            WriteError: the file cannot be written.
        """
        with (
            wrap_write_errors("the metrics", self._path),
            self._path.open("ab", buffering=0) as file,
        ):
            before = file.tell()
            line = _format_json_line(metrics, samples).encode()
            try:
                if file.write(line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                with suppress(OSError):
                    file.truncate(before)
                raise


def read_metrics(path: Path, names: Collection[str] | None = None) -> list[StepMetrics]:
    """Read the metrics of all training steps, merged by step; [] if the file is missing.

    Damaged lines are skipped.

    Args:
        names: metrics to keep in memory; None: all.

    Raises:
        OSError: the file cannot be read.
    """
    steps: dict[float, StepMetrics] = {}
    for metrics, _ in _read_lines(path):
        if metrics is not None:
            selected = (
                metrics
                if names is None
                else {name: metrics[name] for name in names if name in metrics}
            )
            steps.setdefault(metrics["step"], {}).update(selected)
    return list(steps.values())


def metric_values(rows: Sequence[StepMetrics], name: str) -> list[float]:
    """Return the values of one metric over the training steps, nan where missing."""
    return [metrics.get(name, math.nan) for metrics in rows]


def _read_lines(path: Path) -> Iterator[tuple[StepMetrics | None, bytes]]:
    """Yield each complete line of the metrics file, parsed; None for a damaged line."""
    if path.exists():
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.endswith(b"\n"):
                    yield _parse_line(line[:-1], path, number), line


def _move_damaged(path: Path, lines: Sequence[bytes]) -> None:
    damaged_path = path.with_name(f"{path.stem}.damaged{path.suffix}")
    with (
        wrap_write_errors("what is damaged of the metrics", damaged_path),
        damaged_path.open("ab") as file,
    ):
        file.writelines(lines)
    warnings.warn(
        f"{len(lines)} damaged line{'s' if len(lines) > 1 else ''} of {format_path(path)} "
        f"went to {damaged_path.name}; the others are kept",
        UserNotice,
        stacklevel=2,
    )


def _format_json_line(metrics: Mapping[str, float], samples: Sequence[PredictionSample]) -> str:
    # JSON has no nan or inf, so they are written as strings, which `float` parses.
    plain = {
        name: value if math.isfinite(value) else str(float(value))
        for name, value in metrics.items()
    }
    return json.dumps({**plain, SAMPLES: [*samples]} if samples else plain) + "\n"


def _parse_line(line: bytes, path: Path, number: int) -> StepMetrics | None:
    """Parse a line of the metrics file; returns None if it is damaged."""
    try:
        metrics = parse_json(decode_text(line, path, number), path, number)
        if (
            not isinstance(metrics, dict)
            or type(metrics.get("step")) is not int
            or metrics["step"] < 0
        ):
            return None
        return {name: _parse_number(value) for name, value in metrics.items() if name != SAMPLES}
    except (FileError, ValueError, OverflowError):
        return None


def _parse_number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("not a number")
    return float(value) if isinstance(value, str) or abs(value) > 2**63 else value
