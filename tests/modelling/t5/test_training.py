"""The phased training program of FLAN-T5 against Hugging Face's T5 in torch, float32.

The same random weights, and a global batch whose sequences and targets have different lengths.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from transformers import T5Config as HFConfig
from transformers import T5ForConditionalGeneration

import popxl
from config.presets import load_config
from config.t5 import T5Config
from data.pairs import EncodedExamples, PackedExamples
from data.samples import EMPTY
from modelling.phases.training import build_training
from modelling.t5.family import FAMILY
from tests.modelling.sessions import fine_tuning, transposed
from tests.modelling.torch_training import (
    ADAMW,
    OptimizerOf,
    Reference,
    adamw,
    check_training,
    execution,
    logical,
    train,
)

SAMPLES, ENC, DEC, VOCABULARY, STEPS, RATE = 16, 12, 5, 96, 5, 1e-2


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
        words = rng.integers(2, words_known, (samples, enc)).astype(np.int32)
        mask = (np.arange(enc) < rng.integers(2, enc + 1, (samples, 1))).astype(np.int32)
        labels = rng.integers(2, words_known, (samples, dec)).astype(np.int32)
        lengths = rng.integers(1, dec + 1, (samples, 1))
        labels[np.arange(dec) >= lengths] = -100
        decoder = np.concatenate([np.zeros((samples, 1)), labels[:, :-1]], axis=1)
        decoder = np.where(decoder == -100, 0, decoder).astype(np.int32)
        found.append(
            {
                "input_ids": words * mask,
                "attention_mask": mask,
                "decoder_input_ids": decoder,
                "labels": labels,
            }
        )
    return found


@cache
def reference(steps: int = STEPS, optimizer: OptimizerOf = adamw, layers: int = 3) -> Reference:
    """Train Hugging Face's model. Its loss is the mean over all target tokens of a batch."""
    model = their_model(layers)
    return train(model, batches(steps), lambda batch: model(**batch).loss, RATE, optimizer)


SLOW = pytest.mark.slow
TRANSPOSED = (1, 2, 4)
SPLITS = [
    *((1, 1, 2), TRANSPOSED, (2, 2, 2)),
    *(pytest.param(*split, marks=SLOW) for split in ((1, 1, 16), (2, 1, 4), (2, 4, 8))),
]


@pytest.mark.parametrize(("dp", "tp", "micro_batch"), SPLITS)
def test_loss_every_gradient_and_five_steps_of_adamw(dp: int, tp: int, micro_batch: int) -> None:
    """Any split of the global batch over replicas and micro-batches trains as torch does; so it
    does with the sequence before the batch."""
    split = dp, tp, micro_batch
    config = transposed(our_config(*split), split == TRANSPOSED)
    model = fine_tuning(config, gradients=True)
    model.write(logical(their_model()))
    check_training(model, batches(STEPS), reference(), RATE)


# ---- several examples in a row -------------------------------------------------------------------
ROWS, PLACES = 12, 3


def in_rows(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The examples of a batch, at most `PLACES` in a row, and empty rows up to `ROWS`."""
    lengths = batch["attention_mask"].sum(axis=1)
    tokens = np.concatenate([w[:n] for w, n in zip(batch["input_ids"], lengths, strict=True)])
    starts = np.cumsum([0, *lengths])
    examples = EncodedExamples(tokens, starts, batch["labels"], ENC, pad=0)
    packed = PackedExamples.of(examples, PLACES)
    assert SAMPLES > ROWS > len(packed)
    missing = np.full((ROWS - len(packed), PLACES), EMPTY)
    return replace(packed, samples=np.concatenate([packed.samples, missing])).take(range(ROWS))


@pytest.mark.parametrize(
    ("dp", "tp", "micro_batch", "slices"), [(2, 2, 3, 2), pytest.param(1, 2, 6, 1, marks=SLOW)]
)
def test_examples_that_share_rows_train_as_each_by_itself(
    dp: int, tp: int, micro_batch: int, slices: int
) -> None:
    """Torch's examples have a row each: nothing leaks from one example to another."""
    config = our_config(dp, tp).to_dict()
    config["training"]["global_batch_size"] = ROWS
    config["execution"] |= {"micro_batch_size": micro_batch, "attention_serialisation": slices}
    config["data"]["examples_per_row"] = PLACES
    model = fine_tuning(transposed(T5Config.from_dict(config), slices > 1), gradients=True)
    model.write(logical(their_model()))
    check_training(model, [in_rows(batch) for batch in batches(STEPS)], reference(), RATE)


# ---- the program ---------------------------------------------------------------------------------
def test_the_program_is_verified() -> None:
    from popxl._analysis.verify import verify_ir

    verify_ir(build_training(our_config(2, 2), FAMILY.layout).ir)


def test_one_layer_has_no_block_phase() -> None:
    program = build_training(our_config(layers=1), FAMILY.layout)
    assert "encoder_block" not in program.variables
    assert isinstance(program.ir, popxl.Ir)
