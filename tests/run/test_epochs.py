"""Epochs as numbers of steps."""

from __future__ import annotations

import pytest

from config.t5 import T5Config
from data.batches import Loader
from run.schedule import with_steps
from terminal.command_line import read_command_line


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
    assert with_steps(config, samples=101).training.steps == steps


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
    class Ten:
        digest = ""

        def __len__(self):
            return 10

        def take(self, indices):
            return {"indices": indices}

    def first(**seeds):
        data = {"training": {"global_batch_size": 10}, "data": seeds, "model": {"seed": 1}}
        return Loader.of(T5Config.from_dict(data), Ten()).next_batch()["indices"].tolist()

    assert first() == first(seed=1)
    assert first() != first(seed=2)
