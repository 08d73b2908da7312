"""Policy gradients against TRL's losses, trained on the models of transformers in float64."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from config.sections import RunConfig
from data.causal_lm import CAUSAL_LM
from data.seq2seq import SEQ2SEQ
from modelling.layers import LMHeadLoss
from sessions.loss_evaluation import LossSession
from tests.modelling.gptj import hf as gptj
from tests.modelling.llama import hf as llama
from tests.modelling.policy_gradient import (
    batches_of,
    decoder_sequences,
    labels_logps,
    random_examples,
    scored,
    t5_sequences,
    trl_loss,
)
from tests.modelling.sessions import fine_tuning, transposed
from tests.modelling.t5.training import VOCABULARY, our_config, their_model
from tests.modelling.torch_training import check_training, logical, train
from tests.modelling.weight_maps import base_weight_map as llama_weight_map
from tests.slow import slow

pytestmark = pytest.mark.usefixtures("cached")  # other objectives have most of the programs

OBJECTIVES = ("grpo", "dapo", "dr_grpo", "gspo", "rloo")
STEPS, RATE = 3, 2e-3
SETTINGS = {
    "kl": {"beta": 0.3},
    "clipped": {"epsilon": 0.05, "epsilon_high": 0.1, "beta": 0.0, "temperature": 0.7},
    "masked": {"mask_truncated_completions": True, "beta": 0.1},
}


def learning(config: Any, objective: str, settings: Any, batch: int = 4, **data: Any) -> Any:
    """A configuration that learns from rollouts."""
    extra = {"max_completion_length": 7} if objective == "dr_grpo" else {}
    training = replace(
        config.training, objective=objective, global_batch_size=batch, **settings, **extra
    )
    return replace(config, training=training, data=replace(config.data, **data))


def perturbed(model: Any, seed: int) -> Any:
    other = deepcopy(model).double()
    with torch.no_grad():
        torch.manual_seed(seed)
        for p in other.parameters():
            p += 0.02 * torch.randn_like(p)
    return other


def check(config: RunConfig, model: Any, sequences_of: Any, sample_format: Any, vocabulary: int,
          longest: int, weights: Any, named: Any = dict) -> None:  # fmt: skip
    """Three steps of AdamW are torch's in float64, and the metrics of the first are TRL's."""
    temperature = config.training.temperature
    model = model.double()
    old, ref = (labels_logps(sequences_of(perturbed(model, s), temperature)) for s in (7, 8))
    examples = random_examples(20 * config.data.examples_per_sample, vocabulary, longest)
    _, given = batches_of(config, sample_format, examples, old, ref, STEPS)
    told: list[dict[str, float]] = []

    def loss(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        whole = next(b for b in given if np.array_equal(b["labels"], batch["labels"]))
        value, metrics = trl_loss(
            config.training, scored(sequences_of(model, temperature)(batch)), whole
        )
        told.append(metrics)
        return value

    start = weights(model)
    expected = train(model, given, loss, RATE)
    ours = fine_tuning(config, gradients=True)
    ours.write(start)
    check_training(ours, given, expected, RATE, named, rounding=1e-6)  # of advantages around 1
    ours.write(start)
    with ours:
        (result,) = ours.run([given[0]], [RATE], 0)
    names = {*told[0]} & result.aux_metrics.keys()
    assert names == {"clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean",
                     "entropy", *(["kl"] if "kl" in told[0] else [])}  # fmt: skip
    for name in names:
        assert result.aux_metrics[name] == pytest.approx(told[0][name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize(
    ("name", "settings", "dp", "tp", "micro", "places"),
    [
        ("rloo", "masked", 2, 2, 1, 3),
        *(slow(name, settings, 1, 1, 2, 2) for name in OBJECTIVES for settings in SETTINGS),
        *(slow(name, "kl", 2, 2, 1, 3) for name in OBJECTIVES),
        *(slow(name, "clipped", 1, 2, 4, 1) for name in OBJECTIVES),
    ],
)
def test_gptj_learns_as_with_trl(
    name: str, settings: str, dp: int, tp: int, micro: int, places: int
) -> None:
    config = gptj.small_config(dp, tp, micro, sequence_length=20)
    config = learning(config, name, SETTINGS[settings], packing=False, examples_per_sample=places)
    check(transposed(config, dp == 2), gptj.hf_model(gptj.small_config()), decoder_sequences,
          CAUSAL_LM, gptj.VOCABULARY, 5, logical)  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "name", "dp", "tp"),
    [
        ("qwen3", "gspo", 2, 2),
        *(slow("llama", name, 2, 2) for name in OBJECTIVES),
        *(slow("qwen3", name, 1, 2) for name in ("grpo", "dapo", "gspo")),
    ],
)
def test_llama_shaped_models_do(kind: str, name: str, dp: int, tp: int, monkeypatch) -> None:
    """With the logits in slices of the tokens."""
    monkeypatch.setattr(
        LMHeadLoss, "_num_chunks", lambda self, x: self.layout.sequence_length(x) // 4
    )
    theirs = llama.hf_config(kind, max_position_embeddings=64, rope_parameters={
        "rope_type": "default", "rope_theta": 1e4})  # fmt: skip
    config = llama.our_config(theirs, dp, tp, 2, sequence_length=20)
    config = learning(config, name, SETTINGS["kl"], examples_per_sample=2)
    weight_map = llama_weight_map(config)
    check(config, llama.hf_model(theirs), decoder_sequences, CAUSAL_LM, llama.VOCABULARY, 5,
          lambda model: weight_map.from_hf(llama.weights_of(model)),
          lambda ours: dict(weight_map.to_hf(ours)))  # fmt: skip


@pytest.mark.parametrize(
    ("name", "settings", "dp", "tp", "micro", "places"),
    [
        ("dapo", "masked", 2, 1, 1, 2),
        *(slow(name, "kl", 1, 2, 2, 1) for name in OBJECTIVES),
        *(slow(name, "clipped", 2, 2, 1, 3) for name in ("grpo", "rloo")),
    ],
)
def test_t5_does(name: str, settings: str, dp: int, tp: int, micro: int, places: int) -> None:
    config = our_config(dp, tp, micro, layers=1)
    config = learning(config, name, SETTINGS[settings], examples_per_sample=places)
    check(transposed(config, dp == 2), their_model(1), t5_sequences, SEQ2SEQ, VOCABULARY, 4,
          logical)  # fmt: skip


@dataclass(frozen=True)
class Fixed:
    """Samples of known arrays, [samples, rows of each, ...]."""

    arrays: dict[str, np.ndarray]

    def __len__(self) -> int:
        return len(self.arrays["input_ids"])

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        return {n: x[indices].reshape(-1, *x.shape[2:]) for n, x in self.arrays.items()}


@pytest.mark.parametrize("name", ["dapo", "gspo"])
def test_samples_that_fill_up_a_batch_do_not_count(name: str) -> None:
    """Neither their ratios nor their divergences."""
    model = gptj.hf_model(gptj.small_config()).double()
    results = []
    for batch in (1, 4):
        config = gptj.small_config(1, 1, 1, sequence_length=20)
        config = learning(config, name, SETTINGS["kl"], batch, packing=False, examples_per_sample=2)
        old, ref = (labels_logps(decoder_sequences(perturbed(model, s))) for s in (7, 8))
        examples = random_examples(12, gptj.VOCABULARY, 5)
        _, given = batches_of(config, CAUSAL_LM, examples, old, ref, 5 // batch)
        if batch == 1:
            arrays = {n: np.stack([one[n] for one in given]) for n in given[0]}
        session = LossSession(config)
        session.write(logical(model))
        with session:
            results.append(session.compute(Fixed(arrays)))  # type: ignore[arg-type]
    assert results[1].mean == pytest.approx(results[0].mean, rel=1e-5)
    for metric, (total, count) in results[0].metric_sums.items():
        assert results[1].metric_sums[metric] == pytest.approx((total, count), rel=1e-4, abs=1e-6)
