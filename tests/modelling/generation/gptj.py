"""A tiny GPT-J that generates, and what Hugging Face's generates."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from transformers import GPTJForCausalLM

from config.gptj import GPTJConfig
from tests.modelling.generation.harness import (
    Reference,
    hf_greedy,
    right_padded,
)
from tests.modelling.gptj.hf import END, PAD, VOCABULARY, hf_model, small_config
from tests.modelling.torch_training import logical

POSITIONS = 5


def config_of(dp: int, tp: int, micro_batch: int, slices: int = 1) -> GPTJConfig:
    """A tiny GPT-J that generates."""
    return small_config(dp, tp, micro_batch, slices, eval=True, output_length=POSITIONS)


@cache
def reference_model() -> GPTJForCausalLM:
    hf = hf_model(small_config(), seed=4)
    with torch.no_grad():
        hf.lm_head.bias[END] += 0.6  # now and then a sequence ends
    return hf


@cache
def reference() -> Reference:
    """64 prompts of all lengths, padded on the right. Theirs are not padded at all."""
    model, hf = config_of(1, 1, 1).model, reference_model()
    rng = np.random.default_rng(3)
    length = model.sequence_length
    mask = right_padded(rng, length)
    input_ids = np.where(mask, rng.integers(3, VOCABULARY, mask.shape), PAD).astype(np.int32)
    return Reference(logical(hf), input_ids, mask, hf_greedy(hf, input_ids, mask, POSITIONS, PAD))
