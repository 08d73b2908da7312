"""T5Gemma 1 and 2 against Hugging Face's in torch, float32: training."""

from __future__ import annotations

import pytest

from tests.modelling.sessions import fine_tuning, transposed
from tests.modelling.t5gemma.hf import (
    ALL_KINDS,
    RATE,
    batches,
    hf_model,
    our_config,
    packed,
    packed_config,
    reference,
    weights_of,
)
from tests.modelling.torch_training import check_training
from tests.slow import slow


@pytest.mark.parametrize(
    ("kind", "dp", "tp", "micro_batch", "activations"),
    [
        ("wide encoder", 1, 2, 6, "recompute"),
        slow("as published", 1, 1, 6, "keep"),
        slow("untied, no caps", 2, 2, 3, "keep"),
        slow("wide encoder", 2, 1, 2, "auto"),
        slow("t5gemma2", 1, 1, 6, "keep"),
        slow("t5gemma2, other sizes", 2, 2, 3, "recompute"),
    ],
)
def test_examples_that_share_rows_train_as_each_by_itself(
    kind: str, dp: int, tp: int, micro_batch: int, activations: str
) -> None:
    """Loss, every gradient and steps of AdamW. Torch's examples have a row each: positions and
    windows begin anew at each text, and nothing leaks from one to another."""
    settings = {"micro_batch_size": micro_batch, "activations": activations}
    config = packed_config(our_config(kind, dp, tp), **settings)
    model = fine_tuning(transposed(config, tp > 1), gradients=True)
    model.write(weights_of(hf_model(kind)))
    check_training(model, [packed(batch) for batch in batches()], reference(kind), RATE)


def check_kind(kind: str, dp: int, tp: int) -> None:
    model = fine_tuning(our_config(kind, dp, tp), gradients=True)
    model.write(weights_of(hf_model(kind)))
    check_training(model, batches(), reference(kind), RATE)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_every_kind_trains_as_hugging_faces(kind: str, dp: int, tp: int) -> None:
    check_kind(kind, dp, tp)


@pytest.mark.slow
@pytest.mark.quickly
@pytest.mark.parametrize("model_type", ["t5gemma", "t5gemma2"])
@pytest.mark.parametrize("seed", range(15))
def test_drawn_sizes_train_as_hugging_faces(model_type: str, seed: int) -> None:
    check_kind(f"{model_type} {seed}", 1, 1 + seed % 2)
