"""Attention: dropout of its weights, the memory it takes, and what it refuses. Its values:
records/attention.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

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


F, N = popxl.float32, popxl.int32
Q4, V4 = ((2, 4, 3, 8), F), ((2, 2, 5, 8), F)  # q and, in two groups, k and v
ROW = ((2, 3), N), ((2, 5), N)

WRONG: list[tuple[str, list[tuple[tuple[int, ...], popxl.dtype]], Any, str]] = [
    ("leading axes", [((2, 3, 4), F), ((3, 4), F), ((3, 4), F)], ops.attention, "same leading"),
    ("features", [((3, 4), F), ((5, 6), F), ((5, 4), F)], ops.attention, "do not fit"),
    ("values", [((3, 4), F), ((5, 4), F), ((6, 4), F)], ops.attention, "do not fit"),
    ("vectors", [((4,), F)] * 3, ops.attention, "same leading axes"),
    ("no heads", [((2, 4, 3, 8), F), *[((2, 0, 5, 8), F)] * 2], ops.attention, "leading axes"),
    ("no keys", [((1, 3, 4), F), *[((1, 0, 4), F)] * 2], ops.attention, "at least one key"),
    ("integers", [((3, 4), N)] * 3, ops.attention, "floating-point"),
    ("two dtypes", [((3, 4), F), *[((3, 4), popxl.float16)] * 2], ops.attention, "one dtype"),
    *(
        (f"bias {dtype.name}", [Q4, V4, V4, ((3, 5), dtype)], "biases", "biases are float32")
        for dtype in (popxl.bool, N, popxl.float16, popxl.bfloat16)
    ),
    ("wide bias", [Q4, V4, V4, ((2, 2, 4, 3, 5), F)], "biases", "does not broadcast"),
    ("bias", [Q4, V4, V4, ((4,), F)], "biases", "broadcast"),
    ("sinks", [Q4, V4, V4, ((2,), F)], "sinks", "number for each head"),
    ("sinks of numbers", [Q4, V4, V4, ((4,), N)], "sinks", "floating-point"),
    ("sinks of matrices", [((3, 4), F)] * 3 + [((), F)], "sinks", "number for each head"),
    ("lengths", [Q4, V4, V4, ((3,), N)], "lengths", "number for each sample"),
    ("float lengths", [Q4, V4, V4, ((2,), F)], "lengths", "lengths are int32"),
    ("lengths of rank 3", [((2, 3, 4), F)] * 3 + [((2,), N)], "lengths", "for each sample"),
    ("positions", [Q4, V4, V4, ((3, 3), N), ((2, 5), N)], "positions", "positions of queries"),
    ("positions of keys", [Q4, V4, V4, ((1, 3), N), ((1, 3), N)], "positions", "of keys"),
    ("float positions", [Q4, V4, V4, ((1, 3), F), ((1, 5), F)], "positions", "int32, not float32"),
    ("unsigned", [Q4, V4, V4, *[((1, 3), popxl.uint32)] * 2], "positions", "int32, not uint32"),
    ("segments", [Q4, V4, V4, ((3, 3), N), ((3, 5), N)], "segments", "segments of queries"),
    ("segments of rank 3", [((2, 3, 4), F)] * 3 + [ROW[0]] * 2, "segments", "batch, heads"),
]  # fmt: skip


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("specs", "option", "message"), [w[1:] for w in WRONG],
                         ids=[w[0] for w in WRONG])  # fmt: skip
def test_inputs_that_do_not_fit_are_refused(specs, option, message, fused) -> None:
    def attend(q, k, v, *rest):
        if callable(option):
            return option(q, k, v, fused=fused)
        several = option in ("biases", "positions", "segments")
        settings = {"causal": option == "positions", option: list(rest) if several else rest[0]}
        return ops.attention(q, k, v, fused=fused, **settings)

    name = "fused_attention" if fused else "attention"
    with pytest.raises(SpecError, match=rf"^{name}\(.*{message}"):
        popxl.Ir().create_graph(attend, *(popxl.TensorSpec(s, dtype) for s, dtype in specs))


def _is_refused(error: type[Exception], message: str, **settings: Any) -> None:
    with popxl.Ir().main_graph:
        q = popxl.constant(np.zeros((1, 1, 3, 4), np.float32))
        with pytest.raises(error, match=f"^attention: {message}"):
            ops.attention(q, q, q, **settings)


@pytest.mark.parametrize("window", [0, -1, 2.5, True, "2"])
def test_a_window_is_a_positive_integer(window) -> None:
    """A window of 0 would hide the query's own key too, and so all of them."""
    _is_refused((TypeError, ValueError), "window must be", causal=True, window=window)


@pytest.mark.parametrize("window", [(1,), (1, 2, 3), (-1, 0), (0, 1.5), (True, 0)])
def test_a_pair_of_a_window_has_two_numbers_of_0_or_more(window) -> None:
    _is_refused((TypeError, ValueError), "(the )?window", window=window)


def test_a_window_of_one_number_is_causal() -> None:
    _is_refused(ValueError, "a window that is a number is of causal attention", window=2)


@pytest.mark.parametrize("cap", [0, -1.0, np.nan, np.inf])
def test_a_cap_is_positive_and_finite(cap) -> None:
    _is_refused(ValueError, "cap must be positive", cap=cap)


def test_lists_of_inputs_are_no_tensors() -> None:
    with popxl.Ir().main_graph:
        row = popxl.constant(np.zeros((1, 3), np.int32))
        q = popxl.constant(np.zeros((1, 1, 3, 4), np.float32))
        with pytest.raises(TypeError, match="attention: biases are a list of tensors"):
            ops.attention(q, q, q, q)
        for pair in (row, (row,), (row, row, row)):
            with pytest.raises(TypeError, match="attention: segments are a pair of tensors"):
                ops.attention(q, q, q, segments=pair)


def test_dropout_needs_a_probability_and_a_seed() -> None:
    with popxl.Ir().main_graph:
        q = popxl.constant(np.zeros((2, 3), np.float32))
        with pytest.raises(ValueError, match=r"in \[0, 1\), not 1"):
            ops.attention(q, q, q, dropout=1)
        with pytest.raises(ValueError, match="needs seed_tensor"):
            ops.attention(q, q, q, dropout=0.5)
