"""The loss that balances experts, over all layers together, against transformers' own."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from data.causal_lm import CAUSAL_LM
from data.preference_samples import SamplesWithRefLogps
from data.samples import IGNORE_INDEX
from modelling.llama.config_json import to_config_json
from sessions.loss_evaluation import LossSession
from tests.modelling.llama.hf import (
    LENGTH,
    PAD,
    VOCABULARY,
    as_parameters,
    hf_config,
    hf_model,
    our_config,
    weights_of,
)
from tests.modelling.llama.training import RATE, STEPS, batches, check_trained
from tests.modelling.preferences import random_units
from tests.modelling.sessions import fine_tuning
from tests.modelling.torch_training import Reference, train, worst
from tests.modelling.weight_maps import base_weight_map
from tests.slow import slow

COEFFICIENT = 0.4
"""Large: what the loss changes is far beyond the bounds."""


def balanced(kind: str, **settings: Any) -> Any:
    return hf_config(kind, output_router_logits=True, router_aux_loss_coef=COEFFICIENT, **settings)


def trained_balanced(hf_cfg: Any, given: Any, micro_batch: int) -> tuple[Any, Reference]:
    """As transformers trains with micro-batches: the mean of their losses."""
    model = hf_model(hf_cfg)
    start = weights_of(model)
    model.double()

    def loss(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        input_ids, labels = (batch[name].split(micro_batch) for name in ("input_ids", "labels"))
        losses = []
        for x, y in zip(input_ids, labels, strict=True):
            out = model(input_ids=x, output_router_logits=True)
            found = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), y.flatten())
            losses.append(found + COEFFICIENT * balance_of(hf_cfg, out.router_logits))
        return torch.stack(losses).mean()

    return start, train(model, given, loss, RATE)


def balance_of(hf_cfg: Any, logits: Any, mask: torch.Tensor | None = None) -> torch.Tensor:
    return load_balancing_loss_func(logits, hf_cfg.num_experts, hf_cfg.num_experts_per_tok, mask)


@pytest.mark.slow  # by default experts that pass in groups are trained so
@pytest.mark.parametrize(
    ("kind", "dp", "tp", "micro_batch", "activations"),
    [
        ("qwen3_moe", 1, 2, 4, "recompute"),
        ("mixtral", 2, 1, 2, "keep"),
        ("qwen2_moe", 2, 2, 1, "recompute"),
        ("olmoe", 1, 1, 8, "keep"),
        ("gpt_oss", 1, 2, 4, "recompute"),
    ],
)
def test_training_with_balance_is_transformers(
    kind: str, dp: int, tp: int, micro_batch: int, activations: Any
) -> None:
    hf_cfg, given = balanced(kind), batches(STEPS)
    config = our_config(hf_cfg, dp, tp, micro_batch)
    assert config.model.router_aux_loss_coef == COEFFICIENT
    config = replace(config, execution=replace(config.execution, activations=activations))
    check_trained(config, *trained_balanced(hf_cfg, given, micro_batch), given)


def padded_batch() -> dict[str, np.ndarray]:
    """Texts of 2 to 12 tokens, one in a sample, with padding after them."""
    rng = np.random.default_rng(4)
    (batch,) = batches(1)
    there = np.arange(LENGTH) < rng.integers(2, LENGTH + 1, len(batch["labels"]))[:, None]
    return {
        "input_ids": np.where(there, batch["input_ids"], PAD).astype(np.int32),
        "labels": np.where(there, batch["labels"], IGNORE_INDEX).astype(np.int32),
        "segment_ids": there.astype(np.int32),
    }


@pytest.mark.parametrize(
    ("kind", "balance"),
    [("qwen2_moe", COEFFICIENT), slow("qwen3_moe", COEFFICIENT), slow("qwen3_moe", 0.0)],
)
def test_padding_does_not_count_and_experts_are_told_of(kind: str, balance: float) -> None:
    """The metrics and the gradient of a loss that is mostly load balancing."""
    # In float64 the sum of transformers' masks of padding and windows is -inf.
    hf_cfg = (balanced if balance else hf_config)(kind, use_sliding_window=False)
    batch, config = padded_batch(), our_config(hf_cfg, 2, 2, 2)
    assert config.model.router_aux_loss_coef == balance
    model = hf_model(hf_cfg)
    weight_map, ours = base_weight_map(config), fine_tuning(config, gradients=True)
    ours.write(weight_map.from_hf(weights_of(model)))
    with ours:
        (step,) = ours.run([batch], [0.0], 0)
        gradients = as_parameters(weight_map, ours.gradients())
    model.double()
    given = {n: torch.tensor(x).long() for n, x in batch.items()}
    total, balances, chosen = torch.zeros(()), [], np.zeros(hf_cfg.num_experts)
    whole = int((given["labels"] != IGNORE_INDEX).sum())
    for input_ids, labels, mask in zip(*(x.split(2) for x in given.values()), strict=True):
        out = model(input_ids=input_ids, attention_mask=mask, output_router_logits=True)
        loss = torch.nn.functional.cross_entropy(
            out.logits.flatten(0, 1), labels.flatten(), reduction="sum"
        )
        balances.append(balance_of(hf_cfg, out.router_logits, mask))
        total = total + loss / whole + balance * balances[-1] / 4
        for logits in out.router_logits:
            first = logits.topk(hf_cfg.num_experts_per_tok).indices[mask.flatten() == 1]
            chosen += np.bincount(first.flatten(), minlength=hf_cfg.num_experts)
    total.backward()
    expected = {n: p.grad.numpy() for n, p in model.named_parameters()}
    norm = np.sqrt(sum(np.square(g).sum() for g in expected.values()))
    assert step.loss == pytest.approx(total.item(), rel=1e-5)
    assert step.grad_norm == pytest.approx(norm, rel=1e-4)
    error, name = worst(gradients, expected)
    assert error < 1e-4, name
    told = step.aux_metrics
    balance = torch.stack(balances).mean().item()
    assert told["experts/load_balancing_loss"] == pytest.approx(balance, rel=1e-5)
    shares = [told[f"experts/load/{n}"] for n in range(hf_cfg.num_experts)]
    np.testing.assert_allclose(shares, chosen / chosen.sum(), rtol=1e-6)
    assert len(told) == 1 + hf_cfg.num_experts


def test_the_eval_loss_is_without_balance() -> None:
    """The cross-entropy alone, as models without experts report it."""
    config, batch = our_config(balanced("olmoe"), 1, 1, 4), padded_batch()
    model = hf_model(balanced("olmoe"))
    losses = LossSession(config)
    losses.write(base_weight_map(config).from_hf(weights_of(model)))
    with losses:
        found = losses.compute(Batches(batch))
    given = {n: torch.tensor(x).long() for n, x in batch.items()}
    logits = model(input_ids=given["input_ids"], attention_mask=given["segment_ids"]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), given["labels"].flatten())
    assert found.mean == pytest.approx(expected.item(), rel=1e-5)
    assert "segment_ids" not in losses.program.inputs


class Batches:
    """The samples of a batch."""

    def __init__(self, batch: dict[str, np.ndarray]) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return len(self.batch["labels"])

    def take(self, indices: Any) -> dict[str, np.ndarray]:
        return {n: x[np.asarray(indices)] for n, x in self.batch.items()}


def test_the_factor_is_read_where_transformers_uses_it() -> None:
    off = hf_config("olmoe", router_aux_loss_coef=COEFFICIENT)
    assert our_config(off).model.router_aux_loss_coef == 0
    assert not to_config_json(our_config(off))["output_router_logits"]
    written = to_config_json(our_config(balanced("olmoe")))
    assert (written["output_router_logits"], written["router_aux_loss_coef"]) == (True, COEFFICIENT)


@pytest.mark.slow
def test_preferences_are_balanced_too() -> None:
    """The hinge is linear here: the loss is 1, less the margin of rewards, and the balance."""
    config = our_config(balanced("qwen3_moe"), 1, 1, 2)
    training = replace(config.training, objective="hinge", beta=1e-3, global_batch_size=4)
    config = replace(config, training=training)
    units = random_units(60, VOCABULARY, 3, kto=False)
    tokenizer: Any = SimpleNamespace(pad_token_id=PAD, eos_token_id=config.model.eos_token_id)
    samples = CAUSAL_LM.make_pair_samples(config, units, tokenizer)
    logps = np.zeros((*samples.pair_indices.shape, 2), np.float32)
    batch = SamplesWithRefLogps(samples, logps).take(np.arange(4))
    ours = fine_tuning(config)
    ours.write(base_weight_map(config).init_weights(0))
    with ours:
        (step,) = ours.run([batch], [0.0], 0)
    share = (step.loss - 1 + step.aux_metrics["rewards/margins"]) / COEFFICIENT
    chosen, count = config.model.num_experts_per_tok, config.model.num_experts
    assert chosen * 0.99 < share < count
