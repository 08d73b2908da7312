"""Distillation against its loss written out in torch: trained on the models of transformers."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from config.sections import RunConfig
from data.samples import IGNORE_INDEX, Batch, Samples
from data.token_outputs import scatter_rows, top_tokens_rows
from modelling.layers import LMHeadLoss
from tests.modelling.gptj import hf as gptj
from tests.modelling.llama import hf as llama
from tests.modelling.sessions import fine_tuning, transposed
from tests.modelling.t5 import training as t5
from tests.modelling.token_logits import (
    TokenLogits,
    decoder_token_logits,
    seq2seq_token_logits,
)
from tests.modelling.torch_training import check_training, logical, train
from tests.modelling.weight_maps import base_weight_map as llama_weight_map
from tests.run.test_frozen_outputs import gptj_samples, t5_samples
from tests.slow import slow

pytestmark = pytest.mark.usefixtures("cached")  # other objectives have most of the programs

STEPS, RATE, K = 3, 1e-2, 7
BATCH = 8


def distilling(config: Any, places: int, **training: Any) -> Any:
    """A configuration that distils."""
    settings: dict[str, Any] = {"objective": "distill", "teacher": "there", "top_k": K}
    settings |= {"global_batch_size": BATCH, **training}
    data = {"packing": False} if hasattr(config.data, "packing") else {}
    return replace(
        config,
        training=replace(config.training, **settings),
        data=replace(config.data, examples_per_sample=places, **data),
    )


def with_teacher(batch: Batch, logits: torch.Tensor, training: Any) -> Batch:
    """A batch with the likeliest tokens of a teacher's logits, as a pass of it stores them."""
    logps, k = logits.log_softmax(-1), training.top_k
    top = logps.topk(k)
    rest = (logps / training.temperature).scatter(1, top.indices, -torch.inf).logsumexp(-1)
    rest = rest.clamp(min=float(np.log(1e-37)))
    values = torch.cat([top.indices, top.values, rest[:, None]], 1).float().numpy()
    return {**batch, **scatter_rows(top_tokens_rows(values, k), batch["labels"])}


def expected_loss(logits: torch.Tensor, batch: dict[str, torch.Tensor], training: Any) -> Any:
    """The mean over loss tokens, of logits (tokens, vocabulary) in float64."""
    in_loss = batch["labels"] != IGNORE_INDEX
    t, ids = training.temperature, batch["teacher_ids"][in_loss].long()
    log_q, log_p = batch["teacher_logps"][in_loss].double() / t, (logits / t).log_softmax(-1)
    chosen = log_p.gather(1, ids)
    if training.distill_rest == "bin" and ids.shape[1] < logits.shape[1]:
        log_q = torch.cat([log_q, batch["teacher_rest"][in_loss].double()[:, None]], 1)
        others = log_p.scatter(1, ids, -torch.inf).logsumexp(-1, keepdim=True)
        chosen = torch.cat([chosen, others], 1)
    log_q = log_q.log_softmax(-1)
    kl = generalised_jsd(log_q, chosen, training.beta or 0) * t**2
    labels = batch["labels"][in_loss].long()
    ce = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    w = training.distill_weight
    return ((1 - w) * ce + w * kl).mean(), ce.mean(), kl.mean()


def generalised_jsd(teacher: torch.Tensor, student: torch.Tensor, beta: float) -> torch.Tensor:
    """GKD's divergence of log-probabilities (tokens, outcomes), for each token."""
    if beta == 0:
        return (teacher.exp() * (teacher - student)).sum(-1)
    if beta == 1:
        return (student.exp() * (student - teacher)).sum(-1)
    mixture = (beta * teacher.exp() + (1 - beta) * student.exp()).log()
    of_teacher = (teacher.exp() * (teacher - mixture)).sum(-1)
    return beta * of_teacher + (1 - beta) * (student.exp() * (student - mixture)).sum(-1)


@pytest.mark.slow
@pytest.mark.parametrize("beta", [0, 0.1, 0.5, 1])
def test_the_divergence_is_trls(beta: float) -> None:
    gkd = pytest.importorskip("trl.experimental.gkd")
    torch.manual_seed(0)
    teacher, student = torch.randn(2, 6, 30).double(), torch.randn(2, 6, 30).double()
    labels = torch.randint(0, 30, (2, 6))
    labels[0, :2] = IGNORE_INDEX
    expected = gkd.GKDTrainer.generalized_jsd_loss(student, teacher, labels, beta)
    in_loss = labels != IGNORE_INDEX
    found = generalised_jsd(teacher.log_softmax(-1), student.log_softmax(-1), beta)[in_loss]
    assert found.mean().item() == pytest.approx(expected.item())


def check(
    config: RunConfig,
    model: Any,
    token_logits: Callable[[Any], TokenLogits],
    samples: Samples,
    weights: Any = logical,
    named: Any = dict,
) -> None:
    """Three steps of AdamW are torch's in float64, and so is what is told of the first."""
    training = config.training
    teacher = deepcopy(model).double()
    with torch.no_grad():
        torch.manual_seed(7)
        for p in teacher.parameters():
            p += 0.1 * torch.randn_like(p)
    given = []
    for step in range(STEPS):
        batch = samples.take((np.arange(BATCH) + BATCH * step) % len(samples))
        with torch.no_grad():
            read = {name: torch.tensor(x).long() for name, x in batch.items()}
            logits = token_logits(teacher)(read)
        given.append(with_teacher(batch, logits, training))
    start, model = weights(model), model.double()
    told = []

    def loss(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        whole = given[len(told)]  # `train` reads integers
        arrays = {name: torch.tensor(x) for name, x in whole.items()}
        mean, ce, kl = expected_loss(token_logits(model)(batch), arrays, training)
        told.append(
            {"cross_entropy": ce.item(), "kd_loss": kl.item(), "perplexity": np.exp(ce.item())}
        )
        return mean

    expected = train(model, given, loss, RATE)
    ours = fine_tuning(config, gradients=True)
    ours.write(start)
    check_training(ours, given, expected, RATE, named)
    ours.write(start)
    with ours:
        (first,) = ours.run([given[0]], [0.0])
    assert first.aux_metrics == pytest.approx(told[0], rel=1e-4)


JSD = {"distill_rest": "bin", "beta": 0.3}
BIN = {"distill_rest": "bin", "temperature": 2.0, "distill_weight": 0.7}


@pytest.mark.parametrize(
    ("dp", "tp", "micro", "places", "settings"),
    [
        (2, 2, 2, 2, BIN),
        *(slow(2, 2, 2, 2, {**JSD, "beta": beta, "temperature": 2.0}) for beta in (0.5, 1.0)),
        slow(1, 2, 2, 1, {**JSD, "top_k": gptj.VOCABULARY}),  # all tokens: GKD's loss itself
        *(slow(1, 1, micro, 1, {}) for micro in (1, 2, 8)),
        *(slow(1, 2, 2, 3, {"temperature": 0.5}), slow(1, 1, 4, 3, {**BIN, "temperature": 1.0})),
        *(slow(2, 1, 2, 1, {"distill_weight": 1.0}), slow(1, 1, 4, 1, {"distill_weight": 0.0})),
    ],
)
def test_gptj_learns_as_torch_does(
    dp: int, tp: int, micro: int, places: int, settings: dict[str, Any]
) -> None:
    config = distilling(gptj.small_config(dp, tp, micro), places, **settings)
    check(transposed(config, dp == 2), gptj.hf_model(gptj.small_config()), decoder_token_logits,
          gptj_samples(config, places))  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "dp", "tp", "settings"),
    [slow("llama", 2, 2, BIN), slow("qwen3", 2, 2, {}), slow("qwen3", 1, 1, BIN)],
)
def test_llama_shaped_models_do(
    kind: str, dp: int, tp: int, settings: dict[str, Any], monkeypatch: Any
) -> None:
    """With the logits in slices of the tokens."""
    monkeypatch.setattr(
        LMHeadLoss, "_num_chunks", lambda self, x: self.layout.sequence_length(x) // 4
    )
    theirs = llama.hf_config(kind, max_position_embeddings=64, rope_parameters={
        "rope_type": "default", "rope_theta": 1e4})  # fmt: skip
    config = distilling(llama.our_config(theirs, dp, tp, 2), 2, **settings)
    weight_map = llama_weight_map(config)
    check(config, llama.hf_model(theirs), decoder_token_logits, gptj_samples(config, 2),
          lambda model: weight_map.from_hf(llama.weights_of(model)),
          lambda ours: dict(weight_map.to_hf(ours)))  # fmt: skip


@pytest.mark.parametrize(
    ("dp", "tp", "micro", "places", "settings"),
    [
        (2, 1, 1, 2, JSD),
        slow(1, 2, 2, 2, JSD),
        slow(1, 2, 2, 2, {}),
        *(slow(2, 2, 2, 1, BIN), slow(1, 1, 8, 2, BIN), slow(2, 1, 1, 3, {"temperature": 3.0})),
    ],
)
def test_t5_learns_as_torch_does(
    dp: int, tp: int, micro: int, places: int, settings: dict[str, Any]
) -> None:
    config = distilling(t5.our_config(dp, tp, micro, layers=1), places, **settings)
    check(transposed(config, dp == 2), t5.their_model(1), seq2seq_token_logits,
          t5_samples(config, places))  # fmt: skip
