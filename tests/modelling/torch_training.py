"""Training in torch, as the reference for a family's training program."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from sessions.training import TrainingSession

Batch = Mapping[str, np.ndarray]
OptimizerOf = Callable[[list[dict[str, Any]], float], torch.optim.Optimizer]
"""Makes an optimizer of groups of parameters, and the learning rate."""


ADAMW = {"gradient_clipping": 1.0, "weight_decay": 0.1, "eps": 1e-6, "beta2": 0.999}
"""The optimizer's section of a configuration, for what `train` does."""


def execution(dp: int, tp: int, micro_batch: int, slices: int = 1) -> dict[str, Any]:
    """A configuration's section, with everything sharded that can be."""
    return {
        "data_parallel": dp,
        "tensor_parallel": tp,
        "micro_batch_size": micro_batch,
        "attention_serialisation": slices,
        "rts_weights_threshold": 64,
        "device": "cpu",
    }


def named_by_hf(batch: Mapping[str, Any]) -> dict[str, Any]:
    """A batch of one text a sample by the names of Hugging Face's arguments."""
    return {{"segment_ids": "attention_mask"}.get(name, name): x for name, x in batch.items()}


@dataclass(frozen=True)
class Reference:
    """Results of training in torch: losses and norms of the steps, gradients of the first, final
    weights and the optimizer's state by weight."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]
    state: dict[str, dict[str, Any]]


def adamw(groups: list[dict[str, Any]], rate: float) -> torch.optim.Optimizer:
    """torch's AdamW, with the settings of the tests."""
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.999), eps=1e-6)


def train(
    model: torch.nn.Module,
    batches: Sequence[Batch],
    loss_of: Callable[[dict[str, torch.Tensor]], torch.Tensor],
    rate: float,
    optimizer_of: OptimizerOf = adamw,
    only: str = "",
) -> Reference:
    """Train with clipping, a step for each batch, what has gradients.

    Weight decay is 0.1, but for vectors, also those of experts in one; the norm is clipped to 1.

    Args:
        loss_of: the model's loss of a batch.
        only: train the weights alone in whose names this regular expression is.
    """
    named = {n: p for n, p in model.named_parameters() if p.requires_grad and re.search(only, n)}
    for parameter in model.parameters():
        parameter.requires_grad_(any(parameter is p for p in named.values()))
    vectors = {n for n, p in named.items() if p.ndim == 1 or n.endswith("bias")}
    groups = [
        {"params": [p for n, p in named.items() if n not in vectors], "weight_decay": 0.1},
        {"params": [p for n, p in named.items() if n in vectors], "weight_decay": 0.0},
    ]
    optimizer = optimizer_of(groups, rate)
    losses, norms, gradients = [], [], {}
    for batch in batches:
        loss = loss_of({n: torch.tensor(a).long() for n, a in batch.items()})
        optimizer.zero_grad()
        loss.backward()
        gradients = gradients or {n: p.grad.numpy().copy() for n, p in named.items()}
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        losses.append(loss.item())
    state = {n: optimizer.state[p] for n, p in named.items()}
    return Reference(losses, norms, gradients, logical(model), state)


def logical(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """Weights by name."""
    return {n: p.detach().numpy().copy() for n, p in model.named_parameters()}


ROUTER = re.compile(r"\.(gate|router)\.")
ROUNDING = 1e-7
"""Norm below which a router's gradient is rounding, of which AdamW makes steps: where one expert is
chosen it is 0, and transformers computes the softmax in float32."""


def check_training(
    model: TrainingSession,
    batches: Sequence[Any],
    expected: Reference,
    rate: float,
    named: Callable[[Batch], Batch] = dict,
    rounding: float = 0.0,
) -> Batch:
    """Train a model, which has its weights: the loss, every gradient of the first step and the last
    weights must be torch's.

    Args:
        named: gives our tensors the reference's names.
        rounding: of a loss whose terms cancel.

    Returns:
        The last weights.
    """
    with model:
        results = model.run([batches[0]], [rate], 0)
        gradients = named(model.gradients())
        for step, batch in enumerate(batches[1:], 1):
            results += model.run([batch], [rate], step)
        weights = named(model.read(optimizer=False))
    assert results[0].loss == pytest.approx(expected.losses[0], abs=1e-5)
    assert results[0].grad_norm == pytest.approx(expected.norms[0], rel=1e-5)
    losses = [r.loss for r in results]
    np.testing.assert_allclose(losses, expected.losses, rtol=1e-5, atol=rounding)
    np.testing.assert_allclose([r.grad_norm for r in results], expected.norms, rtol=1e-4)
    routers = {n: g for n, g in expected.gradients.items() if ROUTER.search(n)}
    silent = {n for n, g in routers.items() if np.linalg.norm(g) < ROUNDING}
    assert all(np.linalg.norm(gradients[n]) < ROUNDING for n in silent)
    for pair in ((gradients, expected.gradients), (weights, expected.weights)):
        error, name = worst(*({n: a for n, a in of.items() if n not in silent} for of in pair))
        assert error < 1e-4, name
    return weights


def worst(ours: Batch, theirs: Batch) -> tuple[float, str]:
    """The largest error of an array, as norms go, relative to theirs, and whose it is."""
    assert ours.keys() == theirs.keys()
    norms = {n: max(np.linalg.norm(x), 1e-9) for n, x in theirs.items()}
    errors = {n: np.linalg.norm(a - theirs[n]) / norms[n] for n, a in ours.items()}
    return max((float(error), name) for name, error in errors.items())
