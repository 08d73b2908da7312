"""Runs on rows of an objective that needs the outputs of a frozen model, and what they leave."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints import load_checkpoint
from tests import small_runs
from tests.small_runs import TRAINING

NAMES = ("Anna", "Ben")
WORDS = ("lamp", "clock", "book", "carpet", "mirror", "painting", "chair", "box", "bag", "coat")


def write_rows(file: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write a file of JSON lines."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def write_20_rows(file: Path, **texts: str) -> Path:
    """Write rows with a prompt and further texts, in which {} is a word."""
    return write_rows(file, (
        {"prompt": f"{name} took"} | {field: text.format(word) for field, text in texts.items()}
        for name in NAMES for word in WORDS
    ))  # fmt: skip


def train_on(folder: Path, rows: Path, load: str | Path, *arguments: str) -> int:
    """Train, and evaluate, on the same rows."""
    data = ("--data.train", str(rows), "--data.validation", str(rows), "--load", str(load))
    return small_runs.train(folder, *TRAINING, *data, *arguments)


def evaluated_each_second_step(metric: str) -> tuple[str, ...]:
    """Arguments of a run of four steps that keeps the best one by a metric."""
    return ("--steps", "4", "--eval.steps", "2", "--checkpoint.keep_best", metric)


def weights_of(folder: Path) -> dict[str, Any]:
    """The state in a run's last checkpoint."""
    return dict(load_checkpoint(folder).tensors)


def check_equal(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> None:
    """The arrays are the same, bit for bit."""
    assert one.keys() == other.keys()
    for name, array in one.items():
        np.testing.assert_array_equal(array, other[name], err_msg=name)
