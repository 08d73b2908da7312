"""BART against Hugging Face's in torch, float32: training."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from config.bart import BartConfig
from config.model import StartToken
from data.packing import EMPTY_SLOT
from data.seq2seq import EncodedExamples, PackedExamples
from tests.modelling.bart.hf import (
    ENC,
    KINDS,
    PAD,
    RATE,
    SAMPLES,
    batches,
    hf_model,
    our_config,
    reference,
    weights_of,
    without_keys_biases,
)
from tests.modelling.sessions import fine_tuning, transposed
from tests.modelling.torch_training import check_training
from tests.slow import slow

ROWS, PLACES = 12, 3


def join_samples(batch: dict[str, np.ndarray], start: StartToken) -> dict[str, np.ndarray]:
    """The examples of a batch, at most `PLACES` in a row, and empty rows up to `ROWS`."""
    lengths = batch["segment_ids"].sum(axis=1)
    tokens = np.concatenate([w[:n] for w, n in zip(batch["input_ids"], lengths, strict=True)])
    starts = np.cumsum([0, *lengths])
    examples = EncodedExamples(tokens, starts, batch["labels"], ENC, PAD, start=start)
    packed = PackedExamples.from_examples(examples, PLACES)
    assert SAMPLES > ROWS > len(packed)
    missing = np.full((ROWS - len(packed), PLACES), EMPTY_SLOT)
    return replace(packed, samples=np.concatenate([packed.samples, missing])).take(range(ROWS))


TYPES = ("mbart", "m2m_100", "marian", "two vocabularies", "pegasus")


@pytest.mark.parametrize(
    ("kind", "dp", "tp", "micro_batch", "activations"),
    [
        ("as published", 1, 2, 6, "keep"),
        slow("as published", 1, 2, 6, "recompute"),
        *(slow(kind, 1, 1, 6, "keep") for kind in ("as published", "mbart", "m2m_100")),
        *(slow(kind, 1, 1, 6, "keep") for kind in ("marian", "pegasus")),
        *(slow(kind, 2, 2, 3, "recompute") for kind in ("as published", *TYPES)),
        *(slow(kind, 2, 1, 2, "auto") for kind in ("as published", *TYPES)),
    ],
)
def test_examples_that_share_rows_train_as_each_by_itself(
    kind: str, dp: int, tp: int, micro_batch: int, activations: str
) -> None:
    """Loss, every gradient and steps of AdamW. Torch's examples have a row each: positions begin
    anew at each text, and nothing leaks from one to another."""
    check_packed(kind, dp, tp, micro_batch, activations)


def check_packed(kind: str, dp: int, tp: int, micro_batch: int, activations: str) -> None:
    config = our_config(kind, dp, tp).to_dict()
    config["training"]["global_batch_size"] = ROWS
    config["execution"] |= {"micro_batch_size": micro_batch, "activations": activations}
    config["data"]["examples_per_sample"] = PLACES
    model = fine_tuning(transposed(BartConfig.from_dict(config), tp > 1), gradients=True)
    model.write(weights_of(hf_model(kind)))
    start = our_config(kind).model.training_start_token
    rows = [join_samples(batch, start) for batch in batches(kind=kind)]
    check_training(model, rows, reference(kind), RATE, without_keys_biases)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_every_kind_trains_as_hugging_faces(kind: str, dp: int, tp: int) -> None:
    check_kind(kind, dp, tp)


def check_kind(kind: str, dp: int, tp: int) -> None:
    model = fine_tuning(our_config(kind, dp, tp), gradients=True)
    model.write(weights_of(hf_model(kind)))
    check_training(model, batches(kind=kind), reference(kind), RATE, without_keys_biases)
