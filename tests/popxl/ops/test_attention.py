"""Attention: dropout of its weights, the memory it takes, and what it refuses. Its values:
records/attention.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch

import popxl
from popxl import ops
from popxl.errors import SpecError
from popxl.transforms import autodiff
from tests.popxl.compiled import temporary_bytes
from tests.popxl.ops.harness import compile_quickly, evaluate, rand

P, SEED = 0.3, np.array([7, 11], np.uint32)
Q, K = rand(2, 140, 8), rand(2, 50, 8)  # more queries than a tile of fused attention has
V, DY = rand(2, 50, 6), rand(2, 140, 6)


def _single(*arrays: np.ndarray) -> list[np.ndarray]:
    return [a.astype(np.float32) for a in arrays]


def _dropped(fused: bool) -> Callable[..., popxl.Tensor]:
    def attend(q: popxl.Tensor, k: popxl.Tensor, v: popxl.Tensor, seed: popxl.Tensor):
        return ops.attention(q, k, v, seed_tensor=seed, dropout=P, fused=fused)

    return attend


def _with_gradients(fused: bool, *inputs: popxl.Tensor) -> tuple[popxl.Tensor, ...]:
    *arguments, dy = inputs
    graph = popxl.gir().create_graph(_dropped(fused), *arguments)
    gradient = autodiff(graph, grads_required=graph.inputs[:3])
    call = ops.call_with_info(graph, *arguments)
    found = ops.call(gradient.graph, dy, inputs_dict=gradient.inputs_dict(call))
    return call.outputs[0], *found


@pytest.mark.parametrize("fused", [False, True])
def test_dropout_zeroes_weights_and_scales_the_others_forwards_and_backwards(fused) -> None:
    compile_quickly()
    q, k, v, dy = _single(Q, K, V, DY)
    eye = np.broadcast_to(np.eye(50, dtype=np.float32), (2, 50, 50)).copy()
    (weights,) = evaluate(_dropped(fused), q, k, eye, SEED)  # what is left of them
    mask = torch.tensor((weights != 0) / (1 - P))
    assert abs((weights == 0).mean() - P) < 5 * np.sqrt(P * (1 - P) / weights.size)
    assert not np.array_equal(weights[:, :12] == 0, weights[:, -12:] == 0)

    inputs = [torch.tensor(t, requires_grad=True) for t in (Q, K, V)]
    tq, tk, tv = inputs
    expected = (torch.softmax(tq @ tk.mT, -1) * mask) @ tv
    expected.backward(torch.tensor(DY))
    y, *gradients = evaluate(partial(_with_gradients, fused), q, k, v, SEED, dy)
    np.testing.assert_allclose(y, expected.detach(), rtol=1e-5, atol=1e-6)
    for found, t in zip(gradients, inputs, strict=True):
        np.testing.assert_allclose(found, t.grad, rtol=1e-4, atol=1e-5)


def _gradients_of(length: int, fused: bool | None) -> popxl.Ir:
    ir = popxl.Ir()
    with ir.main_graph:
        q, k, v, dy = (popxl.variable(rand(1, 2, length, 8, seed=i)) for i in range(4))
        graph = ir.create_graph(lambda *t: ops.attention(*t, causal=True, fused=fused), q, k, v)
        gradient = autodiff(graph)
        call = ops.call_with_info(graph, q, k, v)
        found = ops.call(gradient.graph, dy, inputs_dict=gradient.inputs_dict(call))
        for t in (*call.outputs[:1], *found):
            ops.host_store(popxl.d2h_stream(t.shape, t.dtype), t)
    return ir


def test_scores_of_long_texts_are_never_held_at_once() -> None:
    """By XLA's own account, forwards and backwards. Without tiles it takes twice the scores."""
    scores = 2 * 1024 * 1024 * 4
    assert temporary_bytes(popxl.Session(_gradients_of(1024, None))) < scores / 3
    assert temporary_bytes(popxl.Session(_gradients_of(1024, False))) > scores


@pytest.mark.parametrize(
    ("shapes", "bias", "message"),
    [
        (((2, 3, 4), (3, 4), (3, 4)), None, "same leading axes"),
        (((3, 4), (5, 6), (5, 4)), None, "do not fit"),
        (((3, 4), (5, 4), (6, 4)), None, "do not fit"),
        (((4,), (4,), (4,)), None, "same leading axes"),
        (((3, 4), (5, 4), (5, 4)), (2, 3, 5), "does not broadcast"),
        (((3, 4), (5, 4), (5, 4)), (4,), "broadcast"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(shapes, bias, message) -> None:
    tensors = [popxl.TensorSpec(s, popxl.float32) for s in shapes]
    biases = [] if bias is None else [popxl.TensorSpec(bias, popxl.float32)]
    with pytest.raises(SpecError, match=message):
        popxl.Ir().create_graph(lambda q, k, v, b: ops.attention(q, k, v, b), *tensors, biases)


def test_dropout_needs_a_probability_and_a_seed() -> None:
    with popxl.Ir().main_graph:
        q = popxl.constant(np.zeros((2, 3), np.float32))
        with pytest.raises(ValueError, match=r"in \[0, 1\), not 1"):
            ops.attention(q, q, q, dropout=1)
        with pytest.raises(ValueError, match="needs seed_tensor"):
            ops.attention(q, q, q, dropout=0.5)
