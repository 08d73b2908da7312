"""Warnings about samples before training."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import run_generation
import run_validation
from config.errors import UserError
from config.llama import LlamaConfig
from data.samples import IGNORE_INDEX
from run.startup_warnings import data_warnings, length_warnings


class Made:
    """Samples of 20 tokens with one text each, of so many tokens, of which the last are learned."""

    def __init__(self, count: int, tokens: int = 20, learned: int = 5) -> None:
        self._count = count
        at = np.arange(20)
        self._row = {
            "input_ids": np.ones(20, np.int32),
            "segment_ids": (at < tokens).astype(np.int32),
            "labels": np.where((at >= tokens - learned) & (at < tokens), 3, IGNORE_INDEX),
        }

    def __len__(self) -> int:
        return self._count

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        assert indices.max() < self._count
        return {name: np.stack([row] * len(indices)) for name, row in self._row.items()}


def config(batch: int = 8, **model: int) -> LlamaConfig:
    return LlamaConfig.from_dict({"training": {"global_batch_size": batch}, "model": model})


@pytest.mark.parametrize(
    ("samples", "batch", "said"),
    [
        (Made(1000), 8, None),
        (Made(8), 8, None),
        (Made(1000, learned=1), 8, "a text has 1.0 loss tokens on average"),
        (Made(1000, learned=0), 8, "a text has 0.0 loss tokens on average"),
        (Made(1000, tokens=1, learned=2), 8, "95% of the tokens are padding: lower --sequence_le"),
        (Made(25), 128, "a batch of 128 takes each of the 25 samples 5.1 times: lower --global_ba"),
    ],
)
def test_samples_that_will_not_do(samples: Any, batch: int, said: str | None) -> None:
    notes = data_warnings(config(batch), samples)
    assert all(note.startswith("warning: ") for note in notes)
    assert any(said in note for note in notes) if said else not notes


def test_more_tokens_than_the_model_was_made_for() -> None:
    assert not length_warnings(config(sequence_length=256, max_position_embeddings=256))
    (note,) = length_warnings(config(sequence_length=257, max_position_embeddings=256))
    assert "model.sequence_length is 257, but the model was made for 256 tokens" in note
    assert not length_warnings(config(sequence_length=250, max_position_embeddings=256), 6)
    (note,) = length_warnings(config(sequence_length=250, max_position_embeddings=256), 7)
    assert "is 250, and up to 7 follow, but the model was made for 256 tokens" in note


def test_it_is_said_where_a_model_answers_and_is_evaluated(monkeypatch, capsys):
    """Before any weights are read."""
    few = ["--config", "gptj_tiny", "--model.max_position_embeddings", "8", "--device", "cpu"]
    monkeypatch.setattr("run.answers.generate.load_inference_weights", stop)
    monkeypatch.setattr("run.evaluation.evaluate_checkpoint.load_inference_weights", stop)
    for main, given in (
        (run_generation.main, ["--no_template", "a b c d"]),
        (run_validation.main, []),
    ):
        assert main([*few, *given]) == 2
        assert "but the model was made for 8 tokens" in capsys.readouterr().err


def stop(*_: object) -> None:
    raise UserError("enough")
