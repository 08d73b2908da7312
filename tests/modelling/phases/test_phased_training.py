"""Phased training of a toy family against the same training in torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.modelling.phases.toy import toy_config
from tests.modelling.phases.toy_runs import (
    RATE,
    SAMPLES,
    STEPS,
    draw,
    feed,
    toy_session,
    weights_of,
)
from tests.slow import slow


def train_torch(*frozen: str) -> tuple[list[float], list[float], list[np.ndarray]]:
    """Losses, gradient norms and final weights (three and the scale), of which some are frozen."""
    weights, scale, xs, ys = draw()
    named = zip(NAMES, [*weights, scale], strict=True)
    parameters = [torch.tensor(w, requires_grad=name not in frozen) for name, w in named]
    groups = [
        {"params": parameters[:3], "weight_decay": 0.1},
        {"params": parameters[3:], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, eps=1e-8)
    losses, norms = [], []
    for x, y in zip(xs, ys, strict=True):
        h = torch.tensor(x)
        for w in parameters[:3]:
            h = h + torch.tanh(h @ w) * parameters[3]
        loss = ((h - torch.tensor(y)) ** 2).sum() / SAMPLES
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, 1.0)))
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, [p.detach().numpy() for p in parameters]


NAMES = ("w0", "w1", "w2", "scale")


@pytest.mark.parametrize(
    ("dp", "tp", "micro_batch", "iterations"),
    [(1, 1, 2, 1), slow(1, 1, 8, 2), slow(2, 2, 1, 1), (4, 1, 2, 4), (2, 4, 2, 1)],
)
def test_equals_torch(dp: int, tp: int, micro_batch: int, iterations: int) -> None:
    config = toy_config(dp, tp, micro_batch, SAMPLES, iterations)
    weights, scale, xs, ys = draw()
    program, session = toy_session(config, weights, scale)
    losses, norms = [], []
    with session:
        for i in range(0, STEPS, iterations):
            batch = {"x": xs[i : i + iterations], "y": ys[i : i + iterations]}
            out = session.run(feed(program, config, batch))
            losses += list(out[program.loss].reshape(iterations, -1).mean(axis=1))
            norms += list(out[program.grad_norm].reshape(-1, dp * tp)[:iterations, 0])
    expected_losses, expected_norms, expected = train_torch()
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    np.testing.assert_allclose(norms, expected_norms, rtol=1e-5)
    variables = weights_of(program)
    data = session.get_tensors_data(variables)
    for variable, value in zip(variables, expected, strict=True):
        np.testing.assert_allclose(data[variable], value, rtol=1e-4, atol=1e-6)
