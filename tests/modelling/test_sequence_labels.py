"""Classification and regression: training is that of transformers' classifiers in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from scipy.stats import pearsonr
from sklearn.metrics import accuracy_score, f1_score

import popxl
import popxl_addons as addons
from config.metrics import add_metric_sums
from data.labeled_samples import IS_LABELED, LABELS
from data.pooling import Pooling, find_pooled_ids
from modelling.layers import ActivationLayout
from modelling.layers.pooling import pool_sequences
from modelling.model_family import get_family
from modelling.objectives import make_objective
from tests.modelling.gptj import hf as gptj
from tests.modelling.llama import hf as llama
from tests.modelling.sequence_labels import (
    labelling,
    loss_of,
    random_batches,
    reward_loss_of,
)
from tests.modelling.sessions import fine_tuning, transposed
from tests.modelling.t5 import training as t5
from tests.modelling.torch_training import check_training, train
from tests.slow import slow

pytestmark = pytest.mark.usefixtures("cached")  # other objectives have most of the programs

STEPS, RATE = 3, 1e-2
CLASSES, NUMBERS, MULTI = ("classification", False), ("regression", False), ("classification", True)
REWARD = ("reward", False)


# ---- pooling ------------------------------------------------------------------------------------
@pytest.mark.parametrize("sequence_first", [False, True])
@pytest.mark.parametrize("pooling", ["mean", "last", "eos", "last_non_pad"])
def test_pooled_vectors(pooling: Pooling, sequence_first: bool) -> None:
    """Of packed texts with end and padding tokens in their midst, and of a place without a text."""
    end, pad = 1, 0
    ids = np.asarray([[5, 1, 6, 0, 0, 7, 1, 1, 0], [3, 1, 0, 4, 5, 1, 4, 0, 0]], np.int32)
    segments = np.asarray([[1, 1, 1, 1, 1, 2, 2, 2, 0], [1, 1, 1, 2, 2, 3, 3, 0, 0]], np.int32)
    expected: dict[str, list[list[list[int]]]] = {
        "mean": [[[0, 1, 2, 3, 4], [5, 6, 7], []], [[0, 1, 2], [3, 4], [5, 6]]],
        "last": [[[4], [7], []], [[2], [4], [6]]],
        "eos": [[[1], [7], []], [[1], [], [5]]],
        "last_non_pad": [[[2], [7], []], [[1], [4], [6]]],
    }
    pooled = find_pooled_ids(segments, pooling, ids, end, pad)
    x = np.random.default_rng(0).standard_normal((2, 9, 4), np.float32)
    layout, ir = ActivationLayout(sequence_first), popxl.Ir()
    with ir.main_graph:
        given = popxl.variable(np.ascontiguousarray(x.swapaxes(0, 1)) if sequence_first else x)
        stream = addons.host_store(pool_sequences(given, popxl.variable(pooled), 3, layout))
    with popxl.Session(ir, "cpu") as session:
        found = session.run()[stream].reshape(2, 3, 4)
    for row, texts in enumerate(expected[pooling]):
        for number, tokens in enumerate(texts):
            mean = x[row, tokens].mean(0) if tokens else np.zeros(4)
            np.testing.assert_allclose(found[row, number], mean, rtol=1e-6, atol=1e-7)


# ---- training -----------------------------------------------------------------------------------
def check(config: Any, model: Any, vocabulary: int, end: int, pad: int) -> None:
    """Three steps of AdamW are those of transformers' classifier, in float64."""
    decodes = config.family == "t5"
    model = model.double().eval()
    model.get_input_embeddings().padding_idx = None  # so that texts with that token teach it
    with torch.no_grad():
        torch.manual_seed(7)
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    batches = random_batches(config, vocabulary, STEPS, decodes, end, pad)
    weight_map = get_family(config).weight_map(config)
    start = {n: p.float().numpy() for n, p in model.state_dict().items()}
    loss: Any = loss_of(model, batches, bool(config.training.multi_label))
    if config.training.objective == "reward":
        loss = reward_loss_of(model, batches, config.training.center_rewards_coefficient)
    expected = train(model, batches, loss, RATE)
    ours = fine_tuning(config, gradients=True)
    ours.write(weight_map.from_hf(start))
    check_training(ours, batches, expected, RATE, lambda w: dict(weight_map.to_hf(w)))


@pytest.mark.parametrize(
    ("kind", "dp", "tp", "micro", "places"),
    [
        (CLASSES, 2, 2, 1, 3),  # with the blocks of rollouts
        slow(CLASSES, 1, 1, 8, 1),
        *(slow(CLASSES, 1, 2, micro, 2) for micro in (1, 2, 8)),
        *(slow(kind, 2, 2, 2, 2) for kind in (NUMBERS, MULTI, REWARD)),
    ],
)
def test_gptj_learns_labels(kind: Any, dp: int, tp: int, micro: int, places: int) -> None:
    config = gptj.small_config(dp, tp, micro, sequence_length=20)
    config = labelling(config, *kind, packing=False, examples_per_sample=places)
    lm = gptj.hf_model(gptj.small_config())
    settings = {"num_labels": config.num_labels, "pad_token_id": gptj.PAD}
    theirs = transformers.GPTJForSequenceClassification(
        transformers.GPTJConfig(**{**lm.config.to_dict(), **settings})
    )
    check(transposed(config, dp == 2), theirs, gptj.VOCABULARY, gptj.END, gptj.PAD)


@pytest.mark.parametrize(
    ("architecture", "kind", "dp", "tp", "micro", "places"),
    [
        slow("qwen3", CLASSES, 2, 2, 2, 2),
        slow("llama", CLASSES, 2, 2, 1, 1),
        *(slow("llama", CLASSES, 1, 2, micro, 2) for micro in (1, 2, 8)),
        ("llama", REWARD, 1, 1, 4, 2),
        *(slow("qwen3", REWARD, 2, 2, micro, 2) for micro in (1, 2)),
        slow("qwen3", REWARD, 1, 2, 8, 1),
        *(slow("qwen3", kind, 2, 2, 2, 2) for kind in (NUMBERS, MULTI)),
    ],
)
def test_llama_shaped_models_do(
    architecture: str, kind: Any, dp: int, tp: int, micro: int, places: int
) -> None:
    hf_config = llama.hf_config(architecture, max_position_embeddings=64, rope_parameters={
        "rope_type": "default", "rope_theta": 1e4})  # fmt: skip
    config = llama.our_config(hf_config, dp, tp, micro, sequence_length=20)
    config = labelling(config, *kind, examples_per_sample=places)
    hf_config.num_labels, hf_config.pad_token_id = config.num_labels, llama.PAD
    torch.manual_seed(1)
    theirs = transformers.AutoModelForSequenceClassification.from_config(hf_config)
    check(transposed(config, dp == 2), theirs, llama.VOCABULARY, llama.END, llama.PAD)


@pytest.mark.parametrize(
    ("kind", "dp", "tp", "micro", "places"),
    [
        (CLASSES, 2, 1, 1, 2),
        slow(CLASSES, 2, 1, 2, 2),
        *(slow(CLASSES, 2, 2, micro, 2) for micro in (1, 2)),
        slow(CLASSES, 1, 2, 8, 1),
        *(slow(kind, 2, 2, 2, 2) for kind in (NUMBERS, MULTI)),
        *(slow(REWARD, 2, 2, 2, places) for places in (1, 2)),
    ],
)
def test_t5_learns_labels(kind: Any, dp: int, tp: int, micro: int, places: int) -> None:
    """The decoder reads the text too, as far as its last end token."""
    config = labelling(t5.our_config(dp, tp, micro, layers=1), *kind, examples_per_sample=places)
    hf_config = t5.their_model(1).config
    hf_config.num_labels, hf_config.pad_token_id, hf_config.eos_token_id = config.num_labels, 0, 1
    torch.manual_seed(1)
    theirs = transformers.T5ForSequenceClassification(hf_config)
    check(transposed(config, dp == 2), theirs, t5.VOCABULARY, 1, 0)


# ---- metrics ------------------------------------------------------------------------------------
def metrics_of(objective: str, multi: bool, scores: Any, labels: Any, present: Any) -> Any:
    """Metrics of an objective over two batches together."""
    config = labelling(gptj.small_config(), objective, multi, packing=False)
    made = make_objective(config)
    halves = [
        made.metric_sums(s, {LABELS: x, IS_LABELED: p})
        for s, x, p in zip(*(np.array_split(a, 2) for a in (scores, labels, present)), strict=True)
    ]
    sums = {**add_metric_sums(*halves), "loss": (0.0, 1.0)}
    return {name: metric(sums) for name, metric in made.metrics.items()}


@pytest.mark.parametrize("multi", [False, True])
def test_metrics_of_classes_are_those_of_scikit_learn(multi: bool) -> None:
    rng = np.random.default_rng(0)
    scores = rng.standard_normal((40, 3))
    labels = (rng.standard_normal((40, 3)) > 0).astype(np.float32)
    if not multi:
        labels = np.eye(3, dtype=np.float32)[rng.integers(0, 2, 40)]
        scores[:, 2] = -9  # a class that is neither expected nor predicted has no F1
    present = np.ones((40, 1), np.float32)
    present[7] = 0
    found = metrics_of("classification", multi, scores, labels, present)
    there = present[:, 0] > 0
    predicted, expected = (scores > 0)[there], labels[there] > 0
    if not multi:
        predicted, expected = scores[there].argmax(1), labels[there].argmax(1)
    assert found["accuracy"] == pytest.approx(accuracy_score(expected, predicted))
    assert found["macro_f1"] == pytest.approx(f1_score(expected, predicted, average="macro"))


def test_metrics_of_numbers_are_those_of_scipy() -> None:
    rng = np.random.default_rng(0)
    scores, present = rng.standard_normal((30, 1)), np.ones((30, 1), np.float32)
    labels = (scores + rng.standard_normal((30, 1))).astype(np.float32)
    found = metrics_of("regression", False, scores, labels, present)
    assert found["mae"] == pytest.approx(np.abs(scores - labels).mean())
    assert found["pearson"] == pytest.approx(pearsonr(scores[:, 0], labels[:, 0])[0])


def test_metrics_of_rewards() -> None:
    scores = np.asarray([[2, 1], [0, 3], [-1, -2], [9, 9]], np.float32)
    present = np.asarray([[1], [1], [1], [0]], np.float32)
    found = metrics_of("reward", False, scores, np.zeros((4, 1), np.float32), present)
    del found["loss"]
    assert found == pytest.approx({
        "accuracy": 2 / 3, "margin": -1 / 3, "mean_reward": 0.5,
        "min_reward": -1.0, "max_reward": 1.0,  # means of two batches
    })  # fmt: skip
