"""A tiny T5, data for its training, and Hugging Face's model trained on it in torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from transformers import T5Config as HFConfig
from transformers import T5ForConditionalGeneration

from config.presets import load_config
from config.t5 import T5Config
from data.packing import EMPTY_SLOT
from data.seq2seq import EncodedExamples, PackedExamples
from tests.modelling.torch_training import (
    ADAMW,
    OptimizerOf,
    Reference,
    adamw,
    execution,
    named_by_hf,
    train,
)

SAMPLES, ENC, DEC, VOCABULARY, STEPS, RATE = 16, 12, 5, 97, 5, 1e-2


def our_config(dp: int = 1, tp: int = 1, micro_batch: int = 4, layers: int = 3) -> T5Config:
    """A tiny T5; global batch SAMPLES."""
    return load_config(
        T5Config,
        "finetuning",
        "tiny",
        {
            "model": {
                "layers": layers,
                "hidden_size": 32,
                "d_ff": 48,
                "sequence_length": ENC,
                "decoder_sequence_length": DEC,
                "embedding": {"vocab_size": VOCABULARY},
                "attention": {
                    "heads": 4,
                    "d_kv": 8,
                    "relative_attention_num_buckets": 8,
                    "relative_attention_max_distance": 16,
                },
            },
            "training": {"global_batch_size": SAMPLES, "optimizer": ADAMW},
            "execution": execution(dp, tp, micro_batch),
        },
    )


def their_model(layers: int = 3) -> T5ForConditionalGeneration:
    """Hugging Face's model of `our_config`, with the same seed each time."""
    ours = our_config(layers=layers).model
    torch.manual_seed(0)
    config = HFConfig(
        vocab_size=VOCABULARY,
        d_model=ours.hidden_size,
        d_kv=ours.attention.d_kv,
        d_ff=ours.d_ff,
        num_layers=ours.layers,
        num_decoder_layers=ours.layers,
        num_heads=ours.attention.heads,
        relative_attention_num_buckets=ours.attention.relative_attention_num_buckets,
        relative_attention_max_distance=ours.attention.relative_attention_max_distance,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    model = T5ForConditionalGeneration(config)
    # Transformers 5 takes the False above to mean "do not scale the decoder's output" and ties the
    # head all the same; FLAN-T5's head is a weight of its own.
    model.lm_head.weight = torch.nn.Parameter(torch.randn(VOCABULARY, config.d_model) * 0.3)
    return model.eval()


def batches(count: int, config: T5Config | None = None) -> list[dict[str, np.ndarray]]:
    """Global batches with lengths from 2 to the maximum, padded right; labels padded with -100.

    Args:
        config: whose sizes they have; default: `our_config`.
    """
    config = config or our_config()
    samples, words_known = config.training.global_batch_size, config.model.embedding.vocab_size
    enc, dec = config.model.sequence_length, config.model.decoder_sequence_length
    rng = np.random.default_rng(0)
    found = []
    for _ in range(count):
        input_ids = rng.integers(2, words_known, (samples, enc)).astype(np.int32)
        mask = (np.arange(enc) < rng.integers(2, enc + 1, (samples, 1))).astype(np.int32)
        labels = rng.integers(2, words_known, (samples, dec)).astype(np.int32)
        lengths = rng.integers(1, dec + 1, (samples, 1))
        labels[np.arange(dec) >= lengths] = -100
        decoder = np.concatenate([np.zeros((samples, 1)), labels[:, :-1]], axis=1)
        decoder = np.where(decoder == -100, 0, decoder).astype(np.int32)
        found.append(
            {
                "input_ids": input_ids * mask,
                "segment_ids": mask,
                "decoder_input_ids": decoder,
                "labels": labels,
            }
        )
    return found


ROWS, PLACES = 12, 3


def join_samples(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The examples of a batch, at most `PLACES` in a row, and empty rows up to `ROWS`."""
    lengths = batch["segment_ids"].sum(axis=1)
    tokens = np.concatenate([w[:n] for w, n in zip(batch["input_ids"], lengths, strict=True)])
    starts = np.cumsum([0, *lengths])
    examples = EncodedExamples(tokens, starts, batch["labels"], ENC, pad=0)
    packed = PackedExamples.from_examples(examples, PLACES)
    assert SAMPLES > ROWS > len(packed)
    missing = np.full((ROWS - len(packed), PLACES), EMPTY_SLOT)
    return replace(packed, samples=np.concatenate([packed.samples, missing])).take(range(ROWS))


@cache
def reference(
    steps: int = STEPS, optimizer: OptimizerOf = adamw, layers: int = 3, only: str = ""
) -> Reference:
    """Train Hugging Face's model. Its loss is the mean over all target tokens of a batch."""
    model = their_model(layers)

    def loss(batch: Mapping[str, Any]) -> torch.Tensor:
        return model(**named_by_hf(batch)).loss

    return train(model, batches(steps), loss, RATE, optimizer, only)
