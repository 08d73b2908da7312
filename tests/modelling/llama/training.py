"""Data for the training of LLaMA-like models, and Hugging Face's models trained on it in torch."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

from data.causal_lm import PackedSequences, TokenBlocks, TokenStream
from data.packing import EMPTY_SLOT
from tests.modelling.llama.hf import (
    LENGTH,
    PAD,
    VOCABULARY,
    as_parameters,
    hf_model,
    weights_of,
)
from tests.modelling.sessions import fine_tuning
from tests.modelling.torch_training import Reference, check_training, train
from tests.modelling.weight_maps import base_weight_map

SAMPLES, STEPS, RATE = 8, 3, 1e-2
Batches = list[dict[str, np.ndarray]]


def batches(count: int) -> Batches:
    """Global batches of packed random tokens, none of which is padding: torch's embedding would not
    train it."""
    rng = np.random.default_rng(0)
    stream = rng.integers(3, VOCABULARY, count * SAMPLES * LENGTH + 1, np.int32)
    packed = TokenBlocks(stream, LENGTH)
    return [packed.take(np.arange(i * SAMPLES, (i + 1) * SAMPLES)) for i in range(count)]


def trained(
    hf_cfg: Any, given: Batches, rate: float = RATE, only: str = ""
) -> tuple[dict[str, np.ndarray], Reference]:
    """Weights before, and what training Hugging Face's model in float64 gives: in float32 its own
    rounding can be larger than the bounds. Its own loss would shift the labels, which the data have
    done."""
    model = hf_model(hf_cfg)
    start = weights_of(model)
    model.double()

    def loss(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if "segment_ids" in batch:
            return loss_of_texts(model, batch)
        logits = model(input_ids=batch["input_ids"]).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    return start, train(model, given, loss, rate, only=only)


def check_trained(
    config: Any,
    start: dict[str, np.ndarray],
    expected: Reference,
    given: Batches,
    rate: float = RATE,
) -> None:
    """Loss, every gradient, and the weights after some steps of AdamW."""
    weight_map = base_weight_map(config)
    model = fine_tuning(config, gradients=True)
    model.write(weight_map.from_hf(start))
    check_training(model, given, expected, rate, partial(as_parameters, weight_map))


def several_texts(seed: int) -> dict[str, np.ndarray]:
    """A batch of texts of 4 to 8 tokens, two in most of the samples."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(4, 9, 3 * SAMPLES)
    starts = np.cumsum([0, *lengths])
    tokens = rng.integers(3, VOCABULARY, starts[-1], np.int32)
    packed = PackedSequences.from_stream(
        TokenStream(tokens, tokens, starts), LENGTH, PAD, max_per_sample=3
    )
    assert len(packed) >= SAMPLES
    assert (packed.samples[:SAMPLES, 1] != EMPTY_SLOT).mean() > 0.5
    return packed.take(np.arange(SAMPLES))


def loss_of_texts(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The mean over all tokens to predict, of each text by itself, without padding."""
    losses = []
    for input_ids, labels, numbers in zip(
        batch["input_ids"], batch["labels"], batch["segment_ids"], strict=True
    ):
        for number in range(1, int(numbers.max()) + 1):
            logits = model(input_ids=input_ids[numbers == number][None]).logits[0]
            target = labels[numbers == number]
            losses.append(torch.nn.functional.cross_entropy(logits, target, reduction="none"))
    return torch.cat(losses).mean()
