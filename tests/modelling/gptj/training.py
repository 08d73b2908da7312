"""Data for the training of GPT-J, and Hugging Face's model trained on it in torch."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from data.causal_lm import TokenBlocks
from tests.modelling.gptj.hf import VOCABULARY, hf_model, small_config
from tests.modelling.torch_training import (
    OptimizerOf,
    Reference,
    adamw,
    train,
)

SAMPLES, LENGTH, STEPS, RATE = 16, 12, 5, 1e-2


def batches(count: int) -> list[dict[str, np.ndarray]]:
    """Global batches of packed random tokens."""
    rng = np.random.default_rng(0)
    stream = rng.integers(0, VOCABULARY, count * SAMPLES * LENGTH + 1, np.int32)
    packed = TokenBlocks(stream, LENGTH)
    return [packed.take(np.arange(i * SAMPLES, (i + 1) * SAMPLES)) for i in range(count)]


@cache
def reference(
    steps: int = STEPS,
    optimizer: OptimizerOf = adamw,
    only: str = "",
    layers: int = 3,
    rate: float = RATE,
) -> Reference:
    """Train Hugging Face's model. Its own loss would shift the labels, which the data have done."""
    model = hf_model(small_config(layers=layers))

    def loss(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = model(input_ids=batch["input_ids"]).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    return train(model, batches(steps), loss, rate, optimizer, only)
