"""The phased training program against Hugging Face's models in torch, float32, of every kind."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from data.samples import EMPTY
from data.streams import PackedTexts, PackedTokens, TokenStream
from modelling.llama.weights import weight_table
from tests.modelling.llama.hf import (
    LENGTH,
    PAD,
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


# ---- several texts in a sample ------------------------------------------------------------------
def several_texts() -> PackedTexts:
    """Texts of 2 to 7 tokens, two or three in each of the samples."""
    rng = np.random.default_rng(5)
    lengths = rng.integers(2, 8, 3 * SAMPLES)
    starts = np.cumsum([0, *lengths])
    tokens = rng.integers(3, VOCABULARY, starts[-1], np.int32)
    packed = PackedTexts.of(TokenStream(tokens, tokens, starts), LENGTH, PAD, most=3)
    assert len(packed) >= SAMPLES
    assert (packed.samples[:SAMPLES, 1] != EMPTY).all()
    return packed


def loss_of_texts(logits_of: Any, batch: dict[str, np.ndarray]) -> torch.Tensor:
    """The mean over all tokens to predict, of each text by itself, without padding."""
    losses = []
    for words, labels, numbers in zip(
        batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True
    ):
        for number in range(1, numbers.max() + 1):
            text = torch.tensor(words[numbers == number][None]).long()
            target = torch.tensor(labels[numbers == number]).long()
            losses.append(
                torch.nn.functional.cross_entropy(logits_of(text)[0], target, reduction="none")
            )
    return torch.cat(losses).mean()


def check_texts(config: Any, model: Any, weights: dict[str, np.ndarray], table: Any) -> None:
    """Loss and gradients of samples with several texts."""
    batch = several_texts().take(np.arange(SAMPLES))
    loss = loss_of_texts(lambda text: model(input_ids=text).logits, batch)
    loss.backward()
    expected = {n: p.grad.numpy() for n, p in model.named_parameters()}
    ours = fine_tuning(config, gradients=True)
    ours.write(table.renamed(weights))
    with ours:
        (result,) = ours.run([batch], [RATE], 0)
        gradients = dict(table.for_files(ours.gradients()))
    assert result.loss == pytest.approx(loss.item(), abs=1e-5)
    error, name = worst(gradients, expected)
    assert error < 1e-4, name


@pytest.mark.parametrize(
    ("kind", "slices"),
    [("gemma3_text", 3), pytest.param("smollm3", 1, marks=pytest.mark.slow)],
)
def test_texts_of_a_sample_do_not_see_one_another(kind: str, slices: int) -> None:
    theirs = hf_config(kind)
    config, model = our_config(theirs, micro_batch=2, slices=slices), hf_model(theirs)
    check_texts(config, model, weights_of(model), weight_table(config))
