"""Objectives of preferences against losses written out in torch: by themselves, in float64, and
trained on the models of transformers."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import popxl
import popxl_addons as addons
from config.metrics import add_metric_sums
from config.sections import RunConfig
from data.causal_lm import CAUSAL_LM
from data.seq2seq import SEQ2SEQ
from modelling.layers import LMHeadLoss, ParallelGroups
from modelling.objectives import make_objective
from popxl import ops
from tests.modelling.encoder_decoders import KINDS, without_images
from tests.modelling.gptj import hf as gptj
from tests.modelling.llama import hf as llama
from tests.modelling.preferences import (
    OBJECTIVES,
    Logps,
    as_float,
    batches_of,
    close,
    decoder_logps,
    loss_of,
    random_units,
    t5_logps,
)
from tests.modelling.sessions import fine_tuning, transposed
from tests.modelling.t5.training import VOCABULARY, our_config, their_model
from tests.modelling.torch_training import check_training, logical, train
from tests.modelling.weight_maps import base_weight_map as llama_weight_map
from tests.slow import slow

pytestmark = pytest.mark.usefixtures("cached")  # other objectives have most of the programs

STEPS, RATE = 3, 1e-2


def preferring(config: Any, objective: str, batch: int = 4, **data: Any) -> Any:
    """A configuration that learns preferences."""
    training = replace(config.training, objective=objective, global_batch_size=batch)
    return replace(config, training=training, data=replace(config.data, **data))


# ---- the loss of sums ---------------------------------------------------------------------------
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_loss_and_gradient_of_log_probabilities(name: str, smoothing: float) -> None:
    """Far apart, equal, nearly certain, and a place without a unit."""
    if smoothing and name not in ("dpo", "simpo", "cpo"):
        return
    config = preferring(gptj.small_config(), name, packing=False, examples_per_sample=6)
    gamma = {"gamma": 0.7} if name == "simpo" else {}
    training = replace(config.training, label_smoothing=smoothing, beta=0.3, **gamma)
    objective = make_objective(replace(config, training=training))
    rng = np.random.default_rng(0)
    logps = -rng.exponential(9.0, (6, 2)).astype(np.float32)
    logps[1], logps[2, 0], logps[3, 0], logps[5] = -4, -200, -1e-3, 0
    num_loss_tokens = rng.integers(1, 9, (6, 2)).astype(np.float32)
    num_loss_tokens[5] = 0
    reference = logps + rng.standard_normal((6, 2), np.float32)
    reference[1], reference[5] = logps[1], 0
    kto_labels = np.asarray([[1], [-1], [1], [-1], [-1], [1]], np.float32)
    given = {"num_loss_tokens": num_loss_tokens, "ref_logps": reference, "kto_labels": kto_labels}

    def loss(sums: popxl.Tensor, texts: list[popxl.Tensor]) -> popxl.Tensor:
        return objective.loss(sums, dict(zip(objective.sequence_inputs, texts, strict=True)),
                              ParallelGroups.from_current_ir(1))  # fmt: skip

    ir = popxl.Ir()
    with ir.main_graph:
        further = [popxl.variable(given[n]) for n in objective.sequence_inputs]
        inputs = [popxl.variable(logps), *further]
        graph = ir.create_graph(loss, inputs[0].spec, [t.spec for t in inputs[1:]])
        gradient = popxl.transforms.autodiff(graph, grads_required=graph.inputs[:1])
        info = ops.call_with_info(graph, *inputs)
        one = popxl.constant(1.0, popxl.float32)
        (slope,) = ops.call(gradient.graph, one, inputs_dict=gradient.inputs_dict(info))
        streams = [addons.host_store(t) for t in (info.outputs[0], slope)]
    with popxl.Session(ir, "cpu") as session:
        found = session.run()
    leaf = torch.tensor(logps.astype(np.float64), requires_grad=True)
    marks = {n: torch.tensor(x.astype(np.float64)) for n, x in given.items()}
    mean = loss_of(name, leaf, marks["ref_logps"], marks["num_loss_tokens"], marks["kto_labels"],
                   beta=0.3, gamma=0.7, smoothing=smoothing)  # fmt: skip
    expected = mean * 5
    expected.backward()
    assert close(float(found[streams[0]]), expected.item())
    np.testing.assert_allclose(found[streams[1]], leaf.grad, rtol=1e-4, atol=1e-6)


# ---- what is told -------------------------------------------------------------------------------
LOGPS = np.asarray([[-2, -6], [-4, -3], [0, 0], [-8, -9]], np.float32)
REFERENCE = np.asarray([[-3, -3], [-2, -4], [0, 0], [-8, -8]], np.float32)
NUM_LOSS_TOKENS = np.asarray([[2, 3], [4, 1], [0, 0], [1, 9]], np.float32)
KTO_LABELS = np.asarray([[1], [-1], [1], [-1]], np.float32)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        # differences to the reference: chosen 1, -2, 0; rejected -3, 1, -1
        ("dpo", {"rewards/chosen": -0.1, "rewards/rejected": -0.3, "rewards/margins": 0.2,
                 "rewards/accuracies": 2 / 3, "logps/chosen": -14 / 3, "logps/rejected": -6}),
        # means: chosen -1, -1, -8; rejected -2, -3, -1
        ("simpo", {"rewards/chosen": -1, "rewards/rejected": -0.6, "rewards/margins": -0.4,
                   "rewards/accuracies": 2 / 3, "logps/chosen": -10 / 3, "logps/rejected": -2}),
        # sums without a reference
        ("cpo", {"rewards/chosen": -1.4, "rewards/rejected": -1.8, "rewards/accuracies": 2 / 3}),
        # one is liked, two are not; the second texts differ by -3, 1, -1
        ("kto", {"rewards/chosen": 0.3, "rewards/rejected": -0.3, "rewards/margins": 0.6,
                 "logps/chosen": -2, "logps/rejected": -6, "kl": 0}),
    ],
)  # fmt: skip
def test_rewards_and_log_probabilities(name: str, told: dict[str, float]) -> None:
    """Of two batches together, with a place that has no unit; beta is 0.3."""
    config = preferring(gptj.small_config(), name, packing=False)
    objective = make_objective(replace(config, training=replace(config.training, beta=0.3)))
    batch = {
        "num_loss_tokens": NUM_LOSS_TOKENS,
        "ref_logps": REFERENCE,
        "kto_labels": KTO_LABELS,
        "labels": np.zeros((4, 1)),
    }
    parts = [{n: x[rows] for n, x in batch.items()} for rows in (slice(1), slice(1, 4))]
    tallies = [
        objective.metric_sums(LOGPS[:1], parts[0]),
        objective.metric_sums(LOGPS[1:], parts[1]),
    ]
    whole = add_metric_sums(*tallies)
    for metric, value in told.items():
        assert objective.metrics[metric](whole) == pytest.approx(value, abs=1e-6), metric
    assert objective.normalizer(batch) == 3
    only = objective.keep_real_samples(batch, np.asarray([True, True, False, False]))
    assert objective.normalizer(only) == 2
    nothing = objective.metric_sums(LOGPS[2:3], {n: x[2:3] for n, x in batch.items()})
    assert np.isnan(objective.metrics["rewards/chosen"](nothing))


# ---- training -----------------------------------------------------------------------------------
def check(config: RunConfig, name: str, model: Any, logps: Callable[[Any], Logps], shape: Any,
          vocabulary: int, longest: int, weights: Any, named: Any = dict,
          only: str = "", rate: float = RATE) -> None:  # fmt: skip
    """Three steps of AdamW are torch's in float64, and so is what is told of the first.

    Args:
        only: see `torch_training.train`.
    """
    other = deepcopy(model).double()
    with torch.no_grad():
        torch.manual_seed(7)
        for p in other.parameters():
            p += 0.05 * torch.randn_like(p)
    units = random_units(20 * config.data.examples_per_sample, vocabulary, longest, name == "kto")
    given = batches_of(config, shape, units, logps(other), STEPS)
    model, size = model.double(), len(given[0]["num_loss_tokens"])
    groups = config.gradient_accumulation
    by_text = {id(batch): batch for batch in given}

    def loss(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        same = (b for b in by_text.values() if np.array_equal(b["labels"], batch["labels"]))
        whole = next(same)
        read = [as_float(whole, n) for n in ("ref_logps", "num_loss_tokens", "kto_labels")]
        return loss_of(name, logps(model)(batch), *read, groups)  # type: ignore[arg-type]

    start = weights(model)
    expected = train(model, given, loss, rate, only=only)
    expected = replace(expected, weights=named(expected.weights))
    ours = fine_tuning(config, gradients=True)
    ours.write(start)
    check_training(ours, given, expected, rate, named)
    assert size


@pytest.mark.parametrize(
    ("name", "dp", "tp", "micro", "places"),
    [
        slow("dpo", 2, 2, 1, 2),
        *(slow(name, 1, 2, 2, 1) for name in OBJECTIVES),
        *(slow(name, 2, 1, 1, 3) for name in ("kto", "ipo")),
    ],
)
def test_gptj_learns_as_torch_does(name: str, dp: int, tp: int, micro: int, places: int) -> None:
    config = gptj.small_config(dp, tp, micro, sequence_length=20)
    config = preferring(config, name, packing=False, examples_per_sample=places)
    check(transposed(config, dp == 2), name, gptj.hf_model(gptj.small_config()), decoder_logps,
          CAUSAL_LM, gptj.VOCABULARY, 5, logical)  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "name", "dp", "tp"),
    [
        ("qwen3", "dpo", 2, 2),
        *(slow("llama", name, 2, 2) for name in OBJECTIVES),
        *(slow("qwen3", name, 1, 2) for name in ("orpo", "simpo", "kto")),
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
    config = preferring(config, name, examples_per_sample=2)
    weight_map = llama_weight_map(config)
    check(config, name, llama.hf_model(theirs), decoder_logps, CAUSAL_LM, llama.VOCABULARY, 5,
          lambda model: weight_map.from_hf(llama.weights_of(model)),
          lambda ours: dict(weight_map.to_hf(ours)))  # fmt: skip


@pytest.mark.parametrize(
    ("name", "dp", "tp", "micro", "places"),
    [
        ("kto", 2, 1, 1, 2),
        *(slow(name, 1, 2, 2, 1) for name in OBJECTIVES),
        *(slow("kto", 2, 2, 1, 2), slow("simpo", 2, 1, 2, 3)),
    ],
)
def test_t5_learns_as_torch_does(name: str, dp: int, tp: int, micro: int, places: int) -> None:
    """The encoder reads a prompt once for both answers."""
    config = preferring(our_config(dp, tp, micro, layers=1), name, examples_per_sample=places)
    check(transposed(config, dp == 2), name, their_model(1), t5_logps, SEQ2SEQ, VOCABULARY, 4,
          logical)  # fmt: skip


@pytest.mark.slow
@pytest.mark.quickly
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dp", "tp", "micro", "places"), [(1, 2, 2, 1), (2, 1, 1, 2)])
def test_every_encoder_decoder_does(kind: str, dp: int, tp: int, micro: int, places: int) -> None:
    of = KINDS[kind]
    config = preferring(of.config(dp, tp, micro), "dpo", examples_per_sample=places)
    check(config, "dpo", of.model(), t5_logps, SEQ2SEQ, of.vocabulary, 4, of.weights,
          lambda named: without_images(of.audible(named)), of.trained, 2e-3)  # fmt: skip
