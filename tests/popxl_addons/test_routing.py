"""Rows to experts and back, against loops over tokens in NumPy and against torch's gradients."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

import popxl
from popxl import ops
from popxl.transforms import autodiff
from popxl_addons.ops.routing import (
    scale_rows,
    sort_by_expert,
    sort_local_experts,
)
from tests.popxl.ops.harness import evaluate, rand

TOKENS, EXPERTS, K, FEATURES = 7, 4, 2, 4
SCORES = rand(TOKENS, EXPERTS)
SCORES[:, 3] = -9  # nobody takes it
SCORES[2] = 1  # all are equal


def test_rows_are_sorted_by_expert_and_tokens_keep_their_order() -> None:
    chosen = np.array([[1, 0], [4, 1], [1, 4]], np.int32)
    order, places, sizes = evaluate(lambda c: sort_by_expert(c, experts=6), chosen)
    np.testing.assert_array_equal(order, [1, 0, 3, 4, 2, 5])
    np.testing.assert_array_equal(places, [[1, 0], [4, 2], [3, 5]])
    np.testing.assert_array_equal(sizes, [1, 3, 0, 0, 2, 0])


def test_rows_of_some_experts_come_first_and_others_have_no_place() -> None:
    chosen = np.array([[1, 0], [4, 1], [1, 4]], np.int32)
    order, places, sizes = evaluate(partial(sort_local_experts, experts=1), chosen - 1)
    np.testing.assert_array_equal(order, [0, 3, 4])  # a row for each token
    np.testing.assert_array_equal(places, [[0, 3], [3, 1], [2, 3]])
    np.testing.assert_array_equal(sizes, [3])
    order, places, sizes = evaluate(partial(sort_local_experts, experts=3), chosen - 3)
    np.testing.assert_array_equal(order[:2], [2, 5])
    np.testing.assert_array_equal(places, [[6, 6], [0, 6], [6, 1]])
    np.testing.assert_array_equal(sizes, [0, 2, 0])


def _mixture(x: popxl.Tensor, scores: popxl.Tensor) -> popxl.Tensor:
    """Each row times one more than its expert's number."""
    weights, chosen = ops.topk(scores, K, 1, True, True)
    order, places, sizes = sort_by_expert(chosen, experts=EXPERTS)
    matrices = np.stack([(e + 1) * np.eye(FEATURES, dtype=np.float32) for e in range(EXPERTS)])
    rows = order / K
    y = ops.grouped_matmul(x, popxl.constant(matrices), sizes, rows=rows)
    weighed = scale_rows(y, weights, order, places)
    same = popxl.constant(np.stack([np.eye(FEATURES, dtype=np.float32)] * EXPERTS))
    return ops.grouped_matmul(weighed, same, sizes, rows=rows, num_out_rows=TOKENS)


def _mixture_of_groups(x: popxl.Tensor, scores: popxl.Tensor) -> popxl.Tensor:
    """The same, one expert after the other. Rows of others are not numbers, wherever they are."""
    weights, chosen = ops.topk(scores, K, 1, True, True)
    total = popxl.constant(np.zeros((TOKENS, FEATURES), np.float32))
    nothing = popxl.constant(np.full((TOKENS, FEATURES), np.nan, np.float32))
    for e in range(EXPERTS):
        order, places, sizes = sort_local_experts(chosen - e, experts=1)
        here = ops.greater(sizes, popxl.constant(np.arange(TOKENS)[:, None], popxl.int32))
        rows, same = order / K, np.eye(FEATURES, dtype=np.float32)[None]
        y = ops.grouped_matmul(x, popxl.constant((e + 1) * same), sizes, rows=rows)
        weighed = ops.where(here, scale_rows(y, weights, order, places), nothing)
        total = total + ops.grouped_matmul(
            weighed, popxl.constant(same), sizes, rows=rows, num_out_rows=TOKENS
        )
    return total


def _with_gradients(mixture, x: popxl.Tensor, scores: popxl.Tensor, dy: popxl.Tensor):
    graph = popxl.gir().create_graph(mixture, x, scores)
    gradient = autodiff(graph)
    call = ops.call_with_info(graph, x, scores)
    grads = ops.call(gradient.graph, dy, inputs_dict=gradient.inputs_dict(call))
    return (call.outputs[0], *grads)


@pytest.mark.parametrize("mixture", [_mixture, _mixture_of_groups])
def test_a_mixture_and_its_gradients_are_torchs(mixture) -> None:
    x, dy = rand(TOKENS, FEATURES, seed=1), rand(TOKENS, FEATURES, seed=2)
    x_, scores = (torch.tensor(t, requires_grad=True) for t in (x, SCORES))
    first = torch.tensor(np.argsort(-SCORES, kind="stable")[:, :K])
    weights = scores.gather(1, first)
    expected = (weights * (first + 1)).sum(1, keepdim=True) * x_
    expected.backward(torch.tensor(dy))
    given = [t.astype(np.float32) for t in (x, SCORES, dy)]
    found = evaluate(partial(_with_gradients, mixture), *given)
    for ours, theirs in zip(found, (expected.detach(), x_.grad, scores.grad), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=2e-6)


@pytest.mark.optimised
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_gradients_of_groups_are_added_to_what_is_there_bit_for_bit(dtype: type) -> None:
    def added(x, matrices, dy, total):
        graph = popxl.gir().create_graph(
            lambda x, m: ops.grouped_matmul(x, m, popxl.constant(np.array([2, 0, 4], np.int32))),
            x,
            matrices,
        )
        gradient = autodiff(graph, grads_required=[graph.inputs[1]])
        call = ops.call_with_info(graph, x, matrices)
        (made,) = ops.call(gradient.graph, dy, inputs_dict=gradient.inputs_dict(call))
        at_once = ops.var_updates.accumulate_(total + 0, made)
        return at_once, ops.var_updates.accumulate_(total + 0, made * 1)

    given = [rand(6, FEATURES), rand(3 * FEATURES, 5), rand(6, 5, seed=1)]
    total = rand(3 * FEATURES, 5, seed=2).astype(np.float32)
    at_once, later = evaluate(added, *(t.astype(dtype) for t in given), total)
    np.testing.assert_array_equal(at_once, later)
    x, _, dy = (t.astype(dtype).astype(np.float64) for t in given)
    made = np.concatenate([x[:2].T @ dy[:2], np.zeros((FEATURES, 5)), x[2:].T @ dy[2:]])
    np.testing.assert_allclose(at_once, total + made, rtol=2e-3, atol=2e-3)
