"""Training and evaluation with samples padded to the length of their bucket, not to the longest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from config.sections import RunConfig
from data.seq2seq import EncodedExamples
from sessions.loss_evaluation import LossSession
from sessions.training import TrainingSession
from tests.modelling.bart import hf as bart
from tests.modelling.sessions import check_continuing
from tests.modelling.t5 import training as t5
from tests.modelling.t5.test_kinds import config_of as kind_config
from tests.modelling.t5.test_kinds import their_model
from tests.modelling.test_passes import all_on_disk
from tests.modelling.torch_training import logical
from tests.slow import slow

pytestmark = pytest.mark.usefixtures("cached")  # the longest program is that of padded samples

STEPS, RATE = 4, 3e-3
SHARED = {"update": "deferred", "activations": "recompute"}
"""Of the default cases, so that both have the same programs."""


def with_buckets(config: RunConfig, lengths: str = "8") -> RunConfig:
    return config.with_values({"data.length_buckets": lengths})


def in_section(config: RunConfig, section: str, fields: dict[str, Any]) -> RunConfig:
    return config.with_values({f"{section}.{name}": value for name, value in fields.items()})


def t5_config(*split: int) -> RunConfig:
    return t5.our_config(*split, layers=1)


def batches(config: RunConfig, batch: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """Batches of all lengths in turn, with the tokens of `batch`."""
    found = []
    for step in range(STEPS):
        longest = (7, 12, 4)[step % 3]
        segment_ids = batch["segment_ids"] * (np.arange(12) < longest)
        pad = config.model.pad_token_id
        input_ids = np.where(segment_ids, np.roll(batch["input_ids"], step, 0), pad)
        found.append({**batch, "segment_ids": segment_ids.astype(np.int32),
                      "input_ids": input_ids.astype(np.int32)})  # fmt: skip
    return found


def train(config: RunConfig, weights: Any, given: list[Any]) -> tuple[list[float], dict[str, Any]]:
    model = TrainingSession(config)
    model.write(weights)
    with model:
        losses = [model.run([b], [RATE], step)[0].loss for step, b in enumerate(given)]
        return losses, dict(model.read())


@pytest.mark.parametrize(
    ("family", "dp", "tp", "micro_batch", "execution", "lengths"),
    [
        ("t5", 1, 2, 8, SHARED, "8"),
        slow("t5", 1, 2, 8, SHARED, "4,8"),
        slow("t5", 2, 2, 4, {"update": "deferred", "micro_batches_per_pass": 1}, "4,8"),
        slow("t5", 1, 1, 4, {"micro_batches_per_pass": 1, "activations": "keep"}, "4,8"),
        slow("t5", 1, 2, 8, {"rts_activations": True, "micro_batches_per_pass": 1}, "4,8"),
        slow("umt5", 1, 2, 4, {"resident_layers": 1}, "4,8"),
        slow("bart", 2, 1, 4, {"update": "deferred"}, "4,8"),
        slow("bart", 1, 2, 2, {"attention": "fused"}, "4,8"),
    ],
)
def test_losses_and_weights_are_those_of_padded_samples(
    family: str, dp: int, tp: int, micro_batch: int, execution: dict[str, Any], lengths: str
) -> None:
    """The state passes from one program to another: weights, moments, pending updates."""
    config, model, batch = {
        "t5": lambda: (t5_config(dp, tp, micro_batch), t5.their_model(1), t5.batches),
        "umt5": lambda: (kind_config("umt5", dp, tp, micro_batch), their_model("umt5"), t5.batches),
        "bart": lambda: (
            bart.our_config("as published", dp, tp, micro_batch), bart.hf_model(), bart.batches
        ),
    }[family]()  # fmt: skip
    weights = bart.weights_of(model) if family == "bart" else logical(model)
    config = in_section(config, "execution", execution)
    given = batches(config, batch(1)[0])
    losses, state = train(config, weights, given)
    ours, ours_state = train(with_buckets(config, lengths), weights, given)
    np.testing.assert_allclose(ours, losses, rtol=3e-6)
    assert ours_state.keys() == state.keys()
    for name, value in state.items():
        np.testing.assert_allclose(ours_state[name], value, rtol=2e-3, atol=2e-5, err_msg=name)


@pytest.mark.parametrize(
    ("tp", "execution", "dropout"),
    [(2, SHARED, 0.0), slow(1, {"update": "deferred"}, 0.1), slow(1, {"update": "end"}, 0.1)],
)
def test_a_run_continues_bit_for_bit(tp: int, execution: dict[str, Any], dropout: float) -> None:
    """Whichever program ran last."""
    config = with_buckets(in_section(t5_config(1, tp, 8), "execution", execution))
    config = config.with_values({"model.dropout_prob": dropout})
    given = batches(config, t5.batches(1)[0])

    def run(model: TrainingSession, first: int, last: int) -> None:
        for step in range(first, last):
            model.run([given[step]], [RATE], step)

    check_continuing(TrainingSession(config), logical(t5.their_model(1)), run)


@pytest.mark.slow
@pytest.mark.parametrize("update", ["deferred", "end"])
def test_state_on_disk_changes_no_bit(update: str) -> None:
    """The programs share the entries on disk, which were planned for the longest."""
    config = with_buckets(t5_config(1, 1, 4), "4,8")
    config = config.with_values({"model.dropout_prob": 0.1, "execution.update": update})
    weights, given = logical(t5.their_model(1)), batches(config, t5.batches(1)[0])
    losses, state = train(config, weights, given)
    with all_on_disk() as folder:
        on_disk = config.with_values({"execution.disk": folder})
        found = train(on_disk, weights, given)
    assert found[0] == losses
    assert [n for n in state if found[1][n].tobytes() != state[n].tobytes()] == []


@pytest.mark.slow
def test_shorter_programs_compile_what_depends_on_lengths_only() -> None:
    """Embeddings, blocks and the encoder's norm, forwards and backwards; no update, no head."""
    config = t5.our_config(1, 1, 4)
    counts = [
        TrainingSession(with_buckets(config, lengths)).session.num_executables
        for lengths in ("12", "8", "4,8")
    ]
    assert counts[2] - counts[1] == counts[1] - counts[0] < counts[0]


@pytest.mark.parametrize("dp", [1, slow(2)])
def test_the_loss_of_validation_is_that_of_padded_samples(dp: int) -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 13, 37)
    tokens = rng.integers(2, t5.VOCABULARY, lengths.sum()).astype(np.int32)
    targets = rng.integers(2, t5.VOCABULARY, (37, t5.DEC)).astype(np.int32)
    samples = EncodedExamples(tokens, np.cumsum([0, *lengths]), targets, 12, pad=0)
    config = t5_config(dp, 1, 4)
    found = []
    for one in (config, with_buckets(config)):
        with_batch = replace(one, training=replace(one.training, global_batch_size=8))
        model = LossSession(with_batch)
        model.write(logical(t5.their_model(1)))
        with model:
            found.append(model.compute(samples))
    assert found[1].tokens == found[0].tokens
    np.testing.assert_allclose(found[1].mean, found[0].mean, rtol=1e-6)
