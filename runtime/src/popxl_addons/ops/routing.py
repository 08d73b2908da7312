"""Routing of tokens to experts: sorting by expert, router weights and usage.

A *row* is a token at one of its experts. Rows are sorted by expert; `ops.grouped_matmul` gathers
them from tokens and sums them up again.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from popxl.custom import jax_op


@jax_op(name="sort_by_expert", no_grad="a choice has no gradient")
def sort_by_expert(topk_experts: Any, *, experts: int) -> tuple[Any, Any, Any]:
    """Sort rows by expert; rows of the same expert stay in token order.

    Args:
        topk_experts: int32 (tokens, k), the experts of each token. Other numbers, such as those of
            padding, belong to no expert: their rows come last.
        experts: number of experts.

    Returns:
        int32 (rows,): the sorted rows, each as token * k + choice; int32 (tokens, k): the inverse
        order, the sorted position of each choice; int32 (experts,): the group sizes, the number of
        rows of each expert.
    """
    return _sort_by_expert(topk_experts, experts)


def _is_expert(topk_experts: Any, experts: int) -> Any:
    return (topk_experts >= 0) & (topk_experts < experts)


def _sort_by_expert(topk_experts: Any, experts: int) -> tuple[Any, Any, Any]:
    if topk_experts.ndim != 2 or topk_experts.dtype != np.int32:
        raise TypeError(
            f"the experts of tokens are int32 (tokens, k), but are {topk_experts.dtype} of shape "
            f"{topk_experts.shape}"
        )
    is_expert = _is_expert(topk_experts, experts)
    expert_of_row = (is_expert * topk_experts + ~is_expert * experts).reshape(-1)
    order = expert_of_row.argsort(stable=True).astype(np.int32)
    sorted_positions = np.arange(order.size, dtype=np.int32)
    inverse_order = order.at[order].set(sorted_positions).reshape(topk_experts.shape)
    starts = expert_of_row[order].searchsorted(np.arange(experts + 1, dtype=np.int32))
    return order, inverse_order, (starts[1:] - starts[:-1]).astype(np.int32)


@jax_op(name="sort_local_experts", no_grad="a choice has no gradient")
def sort_local_experts(topk_experts: Any, *, experts: int) -> tuple[Any, Any, Any]:
    """Sort rows by expert as `sort_by_expert` does, without rows of non-local experts.

    Args:
        topk_experts: int32 (tokens, k), the experts of each token, numbered from the first local
            one: those of others are negative or too large.
        experts: number of local experts.

    Returns:
        As `sort_by_expert`, of tokens * min(k, experts) rows, the most that local experts can have.
        The inverse order of other experts' choices is this number, one past the last row.
    """
    is_local = _is_expert(topk_experts, experts)
    order, inverse_order, group_sizes = _sort_by_expert(topk_experts, experts)
    rows = topk_experts.shape[0] * min(topk_experts.shape[1], experts)
    inverse_order = (is_local * inverse_order + ~is_local * rows).astype(np.int32)
    return order[:rows], inverse_order, group_sizes


def _gather_or_zero(y: Any, indices: Any) -> Any:
    """Gather rows y[indices]; an index just past the last row gives zeros."""
    return y.at[indices].get(mode="fill", fill_value=0)


def _scale_rows_grad(xs: Any, ys: Any, dys: Any) -> tuple[Any, Any, None, None]:
    y, topk_weights, order, inverse_order = xs
    dy = dys[0].astype(np.float32)
    d_rows = dy * _weights_of_rows(topk_weights, order)
    d_weights = _gather_or_zero((dy * y.astype(np.float32)).sum(-1), inverse_order)
    return d_rows.astype(y.dtype), d_weights.astype(topk_weights.dtype), None, None


def _weights_of_rows(topk_weights: Any, order: Any) -> Any:
    return topk_weights.reshape(-1)[order][:, None].astype(np.float32)


@jax_op(name="scale_rows", grad=_scale_rows_grad)
def scale_rows(y: Any, topk_weights: Any, order: Any, inverse_order: Any) -> Any:
    """Multiply each sorted row by the router weight of its token and expert, in float32.

    Args:
        y: (rows, features).
        topk_weights: (tokens, k).
        order, inverse_order: see `sort_by_expert`.

    Returns:
        (rows, features), of the dtype of `y`.
    """
    return (y.astype(np.float32) * _weights_of_rows(topk_weights, order)).astype(y.dtype)


def _group_of_rows(group_sizes: Any, rows: int) -> Any:
    """Return the group (such as an expert) of each sorted row, int32 (rows,).

    Rows of no group get the number of groups.
    """
    ends = group_sizes.clip(0).cumsum()
    return ends.searchsorted(np.arange(rows, dtype=np.int32), side="right")


def _repeat_by_group_grad(xs: Any, ys: Any, dys: Any, *, rows: int) -> tuple[Any, None]:
    """Sum gradients by a matmul with a one-hot matrix; a GPU scatter-add has no fixed order."""
    vectors, group_sizes = xs
    group_ids, row_ids = (np.arange(n, dtype=np.int32) for n in (len(vectors), rows))
    group = _group_of_rows(group_sizes, rows)
    has_group = group < len(vectors)
    # Rows of no group count as zeros: they may be infinite, and 0 * inf is NaN.
    dy = _gather_or_zero(dys[0], has_group * row_ids + ~has_group * rows)
    one_hot = (group == group_ids[:, None]).astype(np.float32)
    return (one_hot @ dy.astype(np.float32)).astype(vectors.dtype), None


@jax_op(name="repeat_by_group", grad=_repeat_by_group_grad)
def repeat_by_group(vectors: Any, group_sizes: Any, *, rows: int) -> Any:
    """Repeat each group's vector for each of its rows; rows are sorted by group.

    Args:
        vectors: (groups, features).
        group_sizes: int32 (groups,), the number of rows of each group; their sum is at most `rows`.

    Returns:
        (rows, features), zeros for rows that belong to no group.
    """
    return _gather_or_zero(vectors, _group_of_rows(group_sizes, rows))


def _scatter_router_weights_grad(xs: Any, ys: Any, dys: Any, *, experts: int) -> tuple[Any, None]:
    topk_weights, topk_experts = xs
    grad = (dys[0][:, None] * _one_hot(topk_experts, experts)).sum(-1)
    return grad.astype(topk_weights.dtype), None


def _one_hot(topk_experts: Any, experts: int) -> Any:
    """Return the mask of each token's top-k experts: bool (tokens, k, experts)."""
    return topk_experts[..., None] == np.arange(experts, dtype=np.int32)


@jax_op(name="scatter_router_weights", grad=_scatter_router_weights_grad)
def scatter_router_weights(topk_weights: Any, topk_experts: Any, *, experts: int) -> Any:
    """Scatter router weights to a dense (tokens, experts) matrix; 0 for experts not in the top k.

    Args:
        topk_weights, topk_experts: (tokens, k).
        experts: number of experts.

    Returns:
        (tokens, experts), of the dtype of `topk_weights`.
    """
    return (topk_weights[..., None] * _one_hot(topk_experts, experts)).sum(1)


def _count_expert_usage_grad(xs: Any, ys: Any, dys: Any) -> tuple[None, Any, None]:
    _, probabilities, token_mask = xs
    grad = dys[0][1] * _mask_column(token_mask)
    return None, grad.astype(probabilities.dtype), None


def _mask_column(token_mask: Any) -> Any:
    """Reshape a token mask to a column: float32 (tokens, 1), 0 for padding, else 1."""
    return (token_mask.reshape(-1, 1) != 0).astype(np.float32)


@jax_op(name="count_expert_usage", grad=_count_expert_usage_grad)
def count_expert_usage(topk_experts: Any, probabilities: Any, token_mask: Any) -> Any:
    """Count each expert's tokens and sum its router probabilities, excluding padding.

    Args:
        topk_experts: int32 (tokens, k), the experts of each token.
        probabilities: (tokens, experts), of all experts.
        token_mask: int32 (tokens,) or of any other shape: 0 for padding.

    Returns:
        float32 (2, experts): counts of tokens, which have no gradient, and sums of probabilities.
    """
    mask, experts = _mask_column(token_mask), probabilities.shape[1]
    counts = (_one_hot(topk_experts, experts) * mask[..., None]).sum((0, 1))
    return counts[None].repeat(2, 0).at[1].set((probabilities * mask).sum(0))
