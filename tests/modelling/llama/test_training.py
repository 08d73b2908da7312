"""The phased training program against Hugging Face's models in torch, float32, of every kind."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from data.streams import PackedTokens
from modelling.llama.weights import weight_table
from tests.modelling.llama.hf import (
    LENGTH,
    SETTINGS,
    VOCABULARY,
    hf_config,
    hf_model,
    our_config,
    weights_of,
)
from tests.modelling.sessions import fine_tuning, transposed
from tests.modelling.torch_training import Reference, train, worst

SAMPLES, STEPS, RATE = 8, 3, 1e-2
LAYOUTS = {
    # (data parallel, tensor parallel, slices of attention); 2 heads of keys are shared at tp 4
    "llama": (1, 4, 3),
    "mistral": (1, 1, 1),
    "qwen2": (2, 2, 1),
    "qwen3": (1, 2, 1),
    "phi3": (1, 1, 2),
    "gemma2": (1, 1, 1),
    "gemma3_text": (1, 2, 3),
    "smollm3": (1, 1, 1),
    "olmo2": (2, 4, 1),
    "granite": (1, 1, 1),
}
TRANSPOSED = ("qwen2", "smollm3")


def batches(count: int) -> list[dict[str, np.ndarray]]:
    """Global batches of packed random tokens, none of which is padding: torch's embedding would not
    train it."""
    rng = np.random.default_rng(0)
    stream = rng.integers(3, VOCABULARY, count * SAMPLES * LENGTH + 1, np.int32)
    packed = PackedTokens(stream, LENGTH)
    return [packed.take(np.arange(i * SAMPLES, (i + 1) * SAMPLES)) for i in range(count)]


def trained(theirs: Any) -> tuple[dict[str, np.ndarray], Reference]:
    """Weights before, and what training Hugging Face's model gives. Its own loss would shift the
    labels, which the data have done."""
    model = hf_model(theirs)
    start = weights_of(model)

    def loss(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = model(input_ids=batch["input_ids"]).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    return start, train(model, batches(STEPS), loss, RATE)


@cache
def reference(kind: str) -> tuple[dict[str, np.ndarray], Reference]:
    return trained(hf_config(kind))


def check_training(config: Any, start: dict[str, np.ndarray], expected: Reference) -> None:
    """Loss, every gradient, and the weights after some steps of AdamW."""
    table = weight_table(config)
    model = fine_tuning(config, gradients=True)
    model.write(table.renamed(start))
    with model:
        first, *others = batches(STEPS)
        results = model.run([first], [RATE], 0)
        gradients = dict(table.for_files(model.gradients()))
        for i, batch in enumerate(others):
            results += model.run([batch], [RATE], i + 1)
        weights = dict(table.for_files(model.read(optimizer=False)))
    assert results[0].loss == pytest.approx(expected.losses[0], abs=1e-5)
    error, name = worst(gradients, expected.gradients)
    assert error < 1e-4, name
    np.testing.assert_allclose([r.loss for r in results], expected.losses, rtol=1e-5)
    np.testing.assert_allclose([r.gradient_norm for r in results], expected.norms, rtol=1e-4)
    error, name = worst(weights, expected.weights)
    assert error < 1e-4, name


@pytest.mark.parametrize("kind", SETTINGS)
def test_loss_every_gradient_and_three_steps_of_adamw(kind: str) -> None:
    dp, tp, slices = LAYOUTS[kind]
    config = our_config(hf_config(kind), dp, tp, micro_batch=2, slices=slices)
    check_training(transposed(config, kind in TRANSPOSED), *reference(kind))
