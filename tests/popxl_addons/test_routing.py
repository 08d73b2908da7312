"""Rows to experts and back, against loops over tokens in NumPy and against torch's gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import popxl
from popxl import ops
from popxl.transforms import autodiff
from popxl_addons.ops.routing import rows_by_expert, sum_rows, take_rows, weigh_rows
from tests.popxl.ops.harness import evaluate, rand

TOKENS, EXPERTS, K, FEATURES = 7, 5, 3, 4
SCORES = rand(TOKENS, EXPERTS)
SCORES[:, 3] = -9  # nobody takes it
SCORES[2] = 1  # all are equal


def test_rows_are_sorted_by_expert_and_tokens_keep_their_order() -> None:
    chosen = np.array([[1, 0], [4, 1], [1, 4]], np.int32)
    order, places, sizes = evaluate(lambda c: rows_by_expert(c, experts=6), chosen)
    np.testing.assert_array_equal(order, [1, 0, 3, 4, 2, 5])
    np.testing.assert_array_equal(places, [[1, 0], [4, 2], [3, 5]])
    np.testing.assert_array_equal(sizes, [1, 3, 0, 0, 2, 0])


def _mixture(x: popxl.Tensor, scores: popxl.Tensor) -> popxl.Tensor:
    """Each row times one more than its expert's number."""
    weights, chosen = ops.topk(scores, K, 1, True, True)
    order, places, sizes = rows_by_expert(chosen, experts=EXPERTS)
    matrices = np.stack([(e + 1) * np.eye(FEATURES, dtype=np.float32) for e in range(EXPERTS)])
    rows = weigh_rows(take_rows(x, order, places), weights, order, places)
    y = ops.grouped_matmul(rows, popxl.constant(matrices), sizes)
    return sum_rows(y, order, places)


def _with_gradients(x: popxl.Tensor, scores: popxl.Tensor, dy: popxl.Tensor):
    graph = popxl.gir().create_graph(_mixture, x, scores)
    gradient = autodiff(graph)
    call = ops.call_with_info(graph, x, scores)
    grads = ops.call(gradient.graph, dy, inputs_dict=gradient.inputs_dict(call))
    return (call.outputs[0], *grads)


def test_a_mixture_and_its_gradients_are_torchs() -> None:
    x, dy = rand(TOKENS, FEATURES, seed=1), rand(TOKENS, FEATURES, seed=2)
    x_, scores = (torch.tensor(t, requires_grad=True) for t in (x, SCORES))
    first = torch.tensor(np.argsort(-SCORES, kind="stable")[:, :K])
    weights = scores.gather(1, first)
    expected = (weights * (first + 1)).sum(1, keepdim=True) * x_
    expected.backward(torch.tensor(dy))
    given = [t.astype(np.float32) for t in (x, SCORES, dy)]
    for ours, theirs in zip(
        evaluate(_with_gradients, *given), (expected.detach(), x_.grad, scores.grad), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=2e-6)


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
