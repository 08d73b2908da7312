"""Routing of tokens to their top-k experts.

A *row* is a token at one of its experts. Rows are sorted by expert, and `ops.grouped_matmul` takes
them from tokens and adds them up again.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from popxl.custom import jax_op


@jax_op(name="sort_by_expert", no_grad="a choice has no gradient")
def sort_by_expert(topk_experts: Any, *, experts: int) -> tuple[Any, Any, Any]:
    """Sort rows by expert, those of one in the order of the tokens.

    Args:
        chosen: int32 (tokens, k), each token's experts. Numbers that are no expert's, as those of
            padding, are in no group: their rows come last.

    Returns:
        int32 (rows,): the number of the choice, of tokens × k, at each place of the sorted rows;
        int32 (tokens, k): the place of each choice; int32 (experts,): each one's number of rows.
    """
    return _by_expert(topk_experts, experts)


def _is_here(topk_experts: Any, experts: int) -> Any:
    return (topk_experts >= 0) & (topk_experts < experts)


def _by_expert(topk_experts: Any, experts: int) -> tuple[Any, Any, Any]:
    if topk_experts.ndim != 2 or topk_experts.dtype != np.int32:
        raise TypeError(
            f"the experts of tokens are int32 (tokens, k), but are {topk_experts.dtype} of shape "
            f"{topk_experts.shape}"
        )
    here = _is_here(topk_experts, experts)
    flat = (here * topk_experts + ~here * experts).reshape(-1)
    order = flat.argsort(stable=True).astype(np.int32)
    places = order.at[order].set(np.arange(order.size, dtype=np.int32)).reshape(topk_experts.shape)
    begins = flat[order].searchsorted(np.arange(experts + 1, dtype=np.int32))
    return order, places, (begins[1:] - begins[:-1]).astype(np.int32)


@jax_op(name="sort_local_experts", no_grad="a choice has no gradient")
def sort_local_experts(topk_experts: Any, *, experts: int) -> tuple[Any, Any, Any]:
    """Like `sort_by_expert`, where tokens may have chosen others besides: their rows come last.

    There is room for as many rows as may be of these experts: tokens × min(k, experts). Choices of
    others, whose numbers are negative or too large, have the place after the last.
    """
    here = _is_here(topk_experts, experts)
    order, places, sizes = _by_expert(topk_experts, experts)
    rows = topk_experts.shape[0] * min(topk_experts.shape[1], experts)
    return order[:rows], (here * places + ~here * rows).astype(np.int32), sizes


def _at(y: Any, places: Any) -> Any:
    """What is there; zeros at the place after the last."""
    return y.at[places].get(mode="fill", fill_value=0)


def _weights_back(xs: Any, ys: Any, dys: Any) -> tuple[Any, Any, None, None]:
    y, weights, order, places = xs
    wide = dys[0].astype(np.float32)
    d_rows = wide * _in_order(weights, order)
    d_weights = _at((wide * y.astype(np.float32)).sum(-1), places)
    return d_rows.astype(y.dtype), d_weights.astype(weights.dtype), None, None


def _in_order(weights: Any, order: Any) -> Any:
    return weights.reshape(-1)[order][:, None].astype(np.float32)


@jax_op(name="scale_rows", grad=_weights_back)
def scale_rows(y: Any, weights: Any, order: Any, places: Any) -> Any:
    """Multiply each row by the weight of its choice, in float32.

    Args:
        y: (rows, features).
        weights: (tokens, k).
        order, places: see `sort_by_expert`.

    Returns:
        (rows, features).
    """
    return (y.astype(np.float32) * _in_order(weights, order)).astype(y.dtype)


def _group_of_rows(sizes: Any, rows: int) -> Any:
    """int32 (rows,), of rows that are sorted by group; those of none have the number after all."""
    return sizes.clip(0).cumsum().searchsorted(np.arange(rows, dtype=np.int32), side="right")


def _vectors_back(xs: Any, ys: Any, dys: Any, *, rows: int) -> tuple[Any, None]:
    """A product: adding up row by row would be in no fixed order on GPUs."""
    vectors, sizes = xs
    groups, places = (np.arange(n, dtype=np.int32) for n in (len(vectors), rows))
    group = _group_of_rows(sizes, rows)
    is_some = group < len(vectors)
    # Rows of no group count as zeros: they may be infinite, and 0 * inf is no number.
    dy = _at(dys[0], is_some * places + ~is_some * rows)
    made = (group == groups[:, None]).astype(np.float32) @ dy.astype(np.float32)
    return made.astype(vectors.dtype), None


@jax_op(name="repeat_by_group", grad=_vectors_back)
def repeat_by_group(vectors: Any, sizes: Any, *, rows: int) -> Any:
    """For rows that are sorted by group, the vector of each one's group.

    Args:
        vectors: (groups, features).
        sizes: int32 (groups,), how many rows each group has, at most `rows` all together.

    Returns:
        (rows, features), zeros for rows that belong to no group.
    """
    return _at(vectors, _group_of_rows(sizes, rows))


def _spread_back(xs: Any, ys: Any, dys: Any, *, experts: int) -> tuple[Any, None]:
    weights, topk_experts = xs
    return (dys[0][:, None] * _is_chosen(topk_experts, experts)).sum(-1).astype(weights.dtype), None


def _is_chosen(topk_experts: Any, experts: int) -> Any:
    """bool (tokens, k, experts)."""
    return topk_experts[..., None] == np.arange(experts, dtype=np.int32)


@jax_op(name="scatter_router_weights", grad=_spread_back)
def scatter_router_weights(weights: Any, topk_experts: Any, *, experts: int) -> Any:
    """The weights of all experts, 0 of those that a token did not choose.

    Args:
        weights, chosen: (tokens, k).

    Returns:
        (tokens, experts), of the dtype of `weights`.
    """
    return (weights[..., None] * _is_chosen(topk_experts, experts)).sum(1)


def _counted_back(xs: Any, ys: Any, dys: Any) -> tuple[None, Any, None]:
    _, probabilities, seen = xs
    return None, (dys[0][1] * _seen(seen)).astype(probabilities.dtype), None


def _seen(seen: Any) -> Any:
    """float32 (tokens, 1)."""
    return (seen.reshape(-1, 1) != 0).astype(np.float32)


@jax_op(name="count_expert_usage", grad=_counted_back)
def count_expert_usage(topk_experts: Any, probabilities: Any, seen: Any) -> Any:
    """How tokens use experts.

    Args:
        chosen: int32 (tokens, k), each token's experts.
        probabilities: (tokens, experts), those of all.
        seen: int32 (tokens,) or of any other shape: 0 where a token is padding.

    Returns:
        float32 (2, experts): how many of the others chose each expert, and the sum of each one's
        probabilities; the former have no gradient.
    """
    seen, experts = _seen(seen), probabilities.shape[1]
    counts = (_is_chosen(topk_experts, experts) * seen[..., None]).sum((0, 1))
    return counts[None].repeat(2, 0).at[1].set((probabilities * seen).sum(0))
