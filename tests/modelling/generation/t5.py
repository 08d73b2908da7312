"""A small T5 that generates, and what Hugging Face's generates."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from transformers import T5ForConditionalGeneration

from config.t5 import T5Config
from tests.modelling.generation.harness import (
    PROMPTS,
    Reference,
    right_padded,
)
from tests.modelling.harness import small_config
from tests.modelling.t5.hf import hf_model

LAYERS, POSITIONS = 3, 10
PAD, END = 0, 1


def config_of(
    dp: int = 1,
    tp: int = 1,
    micro_batch: int = 8,
    iterations: int = 1,
    slices: int = 1,
    **model: object,
) -> T5Config:
    """A small T5 that generates."""
    model = {"layers": LAYERS, "decoder_sequence_length": POSITIONS, "eval": True} | model
    data = small_config(tp, slices, **model).to_dict()
    data["execution"] |= {
        "data_parallel": dp,
        "micro_batch_size": micro_batch,
        "device_iterations": iterations,
        "device": "cpu",
    }
    return T5Config.from_dict(data)


@cache
def reference_model() -> T5ForConditionalGeneration:
    hf = hf_model(config_of())
    # Their generation would scale the decoder's output, as for a head tied to the embedding.
    hf.config.tie_word_embeddings = False
    with torch.no_grad():
        hf.lm_head.weight[END] += 0.7  # now and then a sequence ends
    return hf


@cache
def reference() -> Reference:
    """64 prompts of all lengths, padded on the right."""
    model, hf = config_of().model, reference_model()
    rng = np.random.default_rng(3)
    length = model.sequence_length
    mask = right_padded(rng, length)
    input_ids = rng.integers(2, model.embedding.vocab_size, mask.shape, np.int32) * mask
    generated = hf.generate(
        input_ids=torch.tensor(input_ids).long(),
        attention_mask=torch.tensor(mask),
        do_sample=False,
        num_beams=1,
        max_new_tokens=POSITIONS,
    )
    tokens = np.full((PROMPTS, POSITIONS), PAD)
    tokens[:, : generated.shape[1] - 1] = generated[:, 1:].numpy()  # without the start token
    weights = {name: p.detach().numpy() for name, p in hf.named_parameters()}
    return Reference(weights, input_ids, mask, tokens)
