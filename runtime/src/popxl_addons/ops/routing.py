"""Tokens on their way to the experts that they chose, and back.

A *row* is a token at one of its experts. Rows are sorted by expert; gradients go the same ways
back, as gathers, where those of gathers would add up row by row.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from popxl.custom import jax_op


@jax_op(name="rows_by_expert", no_grad="a choice has no gradient")
def rows_by_expert(chosen: Any, *, experts: int) -> tuple[Any, Any, Any]:
    """Sort rows by expert, those of one in the order of the tokens.

    Args:
        chosen: int32 (tokens, k), each token's experts.

    Returns:
        int32 (rows,): the number of the choice, of tokens × k, at each place of the sorted rows;
        int32 (tokens, k): the place of each choice; int32 (experts,): each one's number of rows.
    """
    return _by_expert(chosen, experts)


def _by_expert(chosen: Any, experts: int) -> tuple[Any, Any, Any]:
    flat = chosen.reshape(-1)
    order = flat.argsort(stable=True).astype(np.int32)
    places = order.argsort().astype(np.int32).reshape(chosen.shape)
    begins = flat[order].searchsorted(np.arange(experts + 1, dtype=np.int32))
    return order, places, (begins[1:] - begins[:-1]).astype(np.int32)


@jax_op(name="rows_of_experts", no_grad="a choice has no gradient")
def rows_of_experts(chosen: Any, first: Any, *, experts: int) -> tuple[Any, Any, Any]:
    """Like `rows_by_expert`, of some neighbouring experts: their rows come first.

    There is room for as many rows as may choose them: tokens × min(k, experts). Other choices have
    the place after the last.

    Args:
        first: int32 scalar, the first of these experts.
    """
    own = chosen - first
    here = (own >= 0) & (own < experts)
    order, places, sizes = _by_expert(jnp.where(here, own, experts), experts)
    rows = chosen.shape[0] * min(chosen.shape[1], experts)
    return order[:rows], jnp.where(here, places, rows).astype(np.int32), sizes


def _at(y: Any, places: Any) -> Any:
    """What is there; zeros at the place after the last."""
    return y.at[places].get(mode="fill", fill_value=0)


def _take(x: Any, order: Any, places: Any) -> Any:
    return x[order // places.shape[1]]


def _sum(y: Any, order: Any, places: Any) -> Any:
    return _at(y, places).astype(np.float32).sum(1).astype(y.dtype)


def _summed_back(xs: Any, ys: Any, dys: Any) -> tuple[Any, None, None]:
    return _sum(dys[0], *xs[1:]), None, None


def _taken_back(xs: Any, ys: Any, dys: Any) -> tuple[Any, None, None]:
    return _take(dys[0], *xs[1:]), None, None


@jax_op(name="take_rows", grad=_summed_back)
def take_rows(x: Any, order: Any, places: Any) -> Any:
    """The rows of tokens.

    Args:
        x: (tokens, features).
        order, places: see `rows_by_expert`.

    Returns:
        (rows, features).
    """
    return _take(x, order, places)


@jax_op(name="sum_rows", grad=_taken_back)
def sum_rows(y: Any, order: Any, places: Any) -> Any:
    """Add up each token's rows, in float32.

    Args:
        y: (rows, features).
        order, places: see `rows_by_expert`.

    Returns:
        (tokens, features).
    """
    return _sum(y, order, places)


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
