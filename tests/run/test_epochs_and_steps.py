"""Epochs as numbers of steps."""

from __future__ import annotations

import numpy as np
import pytest

from config.t5 import T5Config
from data.loader import Loader
from run.learning_rate import resolve_epochs
from run.records.metrics_jsonl import read_metrics
from terminal.command_line import read_command_line
from tests.small_runs import TRAINING, train


class Numbered:
    """So many samples, whose batch is their indices."""

    digest = ""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        return {"indices": indices}


@pytest.mark.parametrize(
    ("epochs", "iterations", "steps"),
    [(None, 1, 500), (1, 1, 4), (3, 1, 10), (3, 4, 12), (0.5, 1, 2)],
)
def test_steps_of_epochs(epochs, iterations, steps):
    config = T5Config.from_dict(
        {
            "training": {"epochs": epochs, "global_batch_size": 32},
            "execution": {"device_iterations": iterations},
        }
    )
    assert resolve_epochs(config, samples=101).training.steps == steps


@pytest.mark.parametrize(
    ("done", "size", "iterations", "steps"),
    [
        ([(8, 10)], 32, 1, 10 + 23),
        ([(32, 10)], 8, 1, 10 + 61),
        ([(8, 8)], 32, 4, 8 + 24),
        ([(8, 2), (32, 3)], 7, 1, 5 + 100),
        ([(100, 9)], 32, 1, 9),
        ([(32, 10)], 32, 1, 26),
    ],
)
def test_steps_of_epochs_after_other_batch_sizes(done, size, iterations, steps):
    """A run of 8 epochs trains 8 epochs, however often its batch changes: the samples decide."""
    loader = Loader(Numbered(101), size, seed=0)
    for earlier, count in done:
        loader = again(loader, earlier)
        for _ in range(count):
            loader.next_batch()
    loader, before = again(loader, size), sum(count for _, count in done)
    seen = loader.num_samples_seen
    config = T5Config.from_dict(
        {
            "training": {"epochs": 8, "global_batch_size": size},
            "execution": {"device_iterations": iterations},
        }
    )
    assert resolve_epochs(config, loader.samples_per_epoch, before, seen).training.steps == steps
    for _ in range(steps - before):
        loader.next_batch()
    assert 8 * 101 <= loader.num_samples_seen < max(8 * 101 + size * iterations, seen + 1)


def test_a_run_resumed_with_another_batch_trains_its_epochs(few, tmp_path):
    """Of 40 samples, 16 are read in batches of 8, the rest in batches of 4."""
    assert train(tmp_path, *TRAINING, "--epochs", "0.4") == 0
    smaller = ("--global_batch_size", "4", "--epochs", "0.8")
    assert train(tmp_path, *TRAINING, *smaller) == 0
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["epoch"] for row in rows] == pytest.approx([0.2, 0.4, 0.5, 0.6, 0.7, 0.8])
    assert train(tmp_path, *TRAINING, *smaller) == 0  # it is complete
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 6


def again(loader: Loader, size: int) -> Loader:
    """A loader of another batch size that resumes where one is."""
    made = Loader(Numbered(101), size, seed=0)
    made.restore(loader.state())
    return made


@pytest.mark.parametrize(
    ("given", "flags", "expected"),
    [
        ("{}", [], (500, 3.0)),
        ("{}", ["--steps", "7"], (7, None)),
        ("{}", ["--epochs", "0.5"], (500, 0.5)),
        ("{steps: 9}", [], (9, None)),
        ("{steps: 9, epochs: 2}", [], (9, 2.0)),
    ],
)
def test_three_epochs_where_nothing_says_how_long(tmp_path, given, flags, expected):
    (tmp_path / "own.yml").write_text(f"family: t5\ntraining: {given}\n")
    line = read_command_line(
        "", "finetuning", "tiny", ["--config", str(tmp_path / "own.yml"), *flags]
    )
    assert (line.config.training.steps, line.config.training.epochs) == expected


def test_the_order_of_the_data_has_a_seed_of_its_own():
    def first(**seeds):
        data = {"training": {"global_batch_size": 10}, "data": seeds, "model": {"seed": 1}}
        return (
            Loader.from_config(T5Config.from_dict(data), Numbered(10))
            .next_batch()["indices"]
            .tolist()
        )

    assert first() == first(seed=1)
    assert first() != first(seed=2)
