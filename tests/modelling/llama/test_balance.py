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
from data.preferences import Referred
from modelling.llama.config_json import to_config_json
from modelling.llama.weights import weight_table
from tests.modelling.llama.hf import (
    PAD,
    VOCABULARY,
    hf_config,
    hf_model,
    our_config,
    weights_of,
)
from tests.modelling.llama.training import RATE, STEPS, batches, check_trained
from tests.modelling.preferences import random_units
from tests.modelling.sessions import fine_tuning
from tests.modelling.torch_training import Reference, train

COEFFICIENT = 0.4
"""Large: what the loss changes is far beyond the bounds."""


def balanced(kind: str, **settings: Any) -> Any:
    return hf_config(kind, output_router_logits=True, router_aux_loss_coef=COEFFICIENT, **settings)


def trained_balanced(theirs: Any, given: Any, micro_batch: int) -> tuple[Any, Reference]:
    """As transformers trains with micro-batches: the mean of their losses."""
    model = hf_model(theirs)
    start = weights_of(model)
    model.double()

    def loss(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        words, labels = (batch[name].split(micro_batch) for name in ("input_ids", "labels"))
        losses = []
        for x, y in zip(words, labels, strict=True):
            out = model(input_ids=x, output_router_logits=True)
            found = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), y.flatten())
            chosen = theirs.num_experts_per_tok
            more = load_balancing_loss_func(out.router_logits, theirs.num_experts, chosen)
            losses.append(found + COEFFICIENT * more)
        return torch.stack(losses).mean()

    return start, train(model, given, loss, RATE)


@pytest.mark.parametrize(
    ("kind", "dp", "tp", "micro_batch", "activations"),
    [
        ("qwen3_moe", 1, 2, 4, "recompute"),
        pytest.param("mixtral", 2, 1, 2, "keep", marks=pytest.mark.slow),
        pytest.param("qwen2_moe", 2, 2, 1, "recompute", marks=pytest.mark.slow),
        pytest.param("olmoe", 1, 1, 8, "keep", marks=pytest.mark.slow),
    ],
)
def test_training_with_balance_is_transformers(
    kind: str, dp: int, tp: int, micro_batch: int, activations: Any
) -> None:
    theirs, given = balanced(kind), batches(STEPS)
    config = our_config(theirs, dp, tp, micro_batch)
    assert config.model.experts.balance == COEFFICIENT
    config = replace(config, execution=replace(config.execution, activations=activations))
    check_trained(config, *trained_balanced(theirs, given, micro_batch), given)


def test_the_factor_is_read_where_transformers_uses_it() -> None:
    off = hf_config("olmoe", router_aux_loss_coef=COEFFICIENT)
    assert our_config(off).model.experts.balance == 0
    assert not to_config_json(our_config(off))["output_router_logits"]
    written = to_config_json(our_config(balanced("olmoe")))
    assert (written["output_router_logits"], written["router_aux_loss_coef"]) == (True, COEFFICIENT)


def test_preferences_are_balanced_too() -> None:
    """The hinge is linear here: the loss is 1, less the margin of rewards, and the balance."""
    config = our_config(balanced("qwen3_moe"), 1, 1, 2)
    training = replace(config.training, objective="hinge", beta=1e-3, global_batch_size=4)
    config = replace(config, training=training)
    units = random_units(60, VOCABULARY, 3, kto=False)
    tokenizer: Any = SimpleNamespace(pad=PAD, end=config.model.end_token)
    samples = CAUSAL_LM.of_units(config, units, tokenizer)
    logps = np.zeros((*samples.places.shape, 2), np.float32)
    batch = Referred(samples, logps).take(np.arange(4))
    ours = fine_tuning(config)
    ours.write(weight_table(config).initial(0))
    with ours:
        (step,) = ours.run([batch], [0.0], 0)
    share = (step.loss - 1 + step.told["rewards/margins"]) / COEFFICIENT
    chosen, count = config.model.experts.chosen, config.model.experts.count
    assert chosen * 0.99 < share < count
