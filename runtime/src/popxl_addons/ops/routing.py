"""Routing of tokens to their top-k experts.

A *row* is a token at one of its experts. Rows are sorted by expert, and `ops.grouped_matmul` takes
them from tokens and adds them up again.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from popxl.custom import jax_op


@jax_op(name="rows_by_expert", no_grad="a choice has no gradient")
def rows_by_expert(chosen: Any, *, experts: int) -> tuple[Any, Any, Any]:
    """Sort rows by expert, those of one in the order of the tokens.

    Args:
        chosen: int32 (tokens, k), each token's experts. Numbers that are no expert's, as those of
            padding, are in no group: their rows come last.

    Returns:
        int32 (rows,): the number of the choice, of tokens × k, at each place of the sorted rows;
        int32 (tokens, k): the place of each choice; int32 (experts,): each one's number of rows.
    """
    return _by_expert(chosen, experts)


def _is_here(chosen: Any, experts: int) -> Any:
    return (chosen >= 0) & (chosen < experts)


def _by_expert(chosen: Any, experts: int) -> tuple[Any, Any, Any]:
    if chosen.ndim != 2 or chosen.dtype != np.int32:
        raise TypeError(
            f"choices are int32 (tokens, k), but are {chosen.dtype} of shape {chosen.shape}"
        )
    here = _is_here(chosen, experts)
    flat = (here * chosen + ~here * experts).reshape(-1)
    order = flat.argsort(stable=True).astype(np.int32)
    places = order.at[order].set(np.arange(order.size, dtype=np.int32)).reshape(chosen.shape)
    begins = flat[order].searchsorted(np.arange(experts + 1, dtype=np.int32))
    return order, places, (begins[1:] - begins[:-1]).astype(np.int32)


@jax_op(name="rows_of_experts", no_grad="a choice has no gradient")
def rows_of_experts(chosen: Any, *, experts: int) -> tuple[Any, Any, Any]:
    """Like `rows_by_expert`, where tokens may have chosen others besides: their rows come last.

    There is room for as many rows as may be of these experts: tokens × min(k, experts). Choices of
    others, whose numbers are negative or too large, have the place after the last.
    """
    here = _is_here(chosen, experts)
    order, places, sizes = _by_expert(chosen, experts)
    rows = chosen.shape[0] * min(chosen.shape[1], experts)
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


@jax_op(name="weigh_rows", grad=_weights_back)
def weigh_rows(y: Any, weights: Any, order: Any, places: Any) -> Any:
    """Multiply each row by the weight of its choice, in float32.

    Args:
        y: (rows, features).
        weights: (tokens, k).
        order, places: see `rows_by_expert`.

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


@jax_op(name="rows_of_groups", grad=_vectors_back)
def rows_of_groups(vectors: Any, sizes: Any, *, rows: int) -> Any:
    """For rows that are sorted by group, the vector of each one's group.

    Args:
        vectors: (groups, features).
        sizes: int32 (groups,), how many rows each group has, at most `rows` all together.

    Returns:
        (rows, features), zeros for rows that belong to no group.
    """
    return _at(vectors, _group_of_rows(sizes, rows))


def _spread_back(xs: Any, ys: Any, dys: Any, *, experts: int) -> tuple[Any, None]:
    weights, chosen = xs
    return (dys[0][:, None] * _is_chosen(chosen, experts)).sum(-1).astype(weights.dtype), None


def _is_chosen(chosen: Any, experts: int) -> Any:
    """bool (tokens, k, experts)."""
    return chosen[..., None] == np.arange(experts, dtype=np.int32)


@jax_op(name="spread_weights", grad=_spread_back)
def spread_weights(weights: Any, chosen: Any, *, experts: int) -> Any:
    """The weights of all experts, 0 of those that a token did not choose.

    Args:
        weights, chosen: (tokens, k).

    Returns:
        (tokens, experts), of the dtype of `weights`.
    """
    return (weights[..., None] * _is_chosen(chosen, experts)).sum(1)


def _counted_back(xs: Any, ys: Any, dys: Any) -> tuple[None, Any, None]:
    _, probabilities, seen = xs
    return None, (dys[0][1] * _seen(seen)).astype(probabilities.dtype), None


def _seen(seen: Any) -> Any:
    """float32 (tokens, 1)."""
    return (seen.reshape(-1, 1) != 0).astype(np.float32)


@jax_op(name="count_experts", grad=_counted_back)
def count_experts(chosen: Any, probabilities: Any, seen: Any) -> Any:
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
    counts = (_is_chosen(chosen, experts) * seen[..., None]).sum((0, 1))
    return counts[None].repeat(2, 0).at[1].set((probabilities * seen).sum(0))
