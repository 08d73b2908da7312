"""Tokens on their way to the experts that they chose, and back.

A *row* is a token at one of its experts. Rows are sorted by expert; gradients go the same ways
back, as gathers, where those of gathers would add up row by row.
"""

from __future__ import annotations

from typing import Any

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
    flat = chosen.reshape(-1)
    order = flat.argsort(stable=True).astype(np.int32)
    places = order.argsort().astype(np.int32).reshape(chosen.shape)
    begins = flat[order].searchsorted(np.arange(experts + 1, dtype=np.int32))
    return order, places, (begins[1:] - begins[:-1]).astype(np.int32)


def _sum_of_rows(xs: Any, ys: Any, dys: Any) -> tuple[Any, None, None]:
    _, _, places = xs
    dx = dys[0][places].astype(np.float32).sum(1)
    return dx.astype(dys[0].dtype), None, None


@jax_op(name="take_rows", grad=_sum_of_rows)
def take_rows(x: Any, order: Any, places: Any) -> Any:
    """The rows of tokens.

    Args:
        x: (tokens, features).
        order, places: see `rows_by_expert`.

    Returns:
        (rows, features).
    """
    return x[order // places.shape[1]]


def _weighted_back(xs: Any, ys: Any, dys: Any) -> tuple[Any, Any, None, None]:
    y, weights, order, places = xs
    (dy,) = dys
    of_rows = dy[order // places.shape[1]].astype(np.float32)
    d_rows = of_rows * weights.reshape(-1)[order][:, None].astype(np.float32)
    d_weights = (of_rows * y.astype(np.float32)).sum(-1)[places]
    return d_rows.astype(y.dtype), d_weights.astype(weights.dtype), None, None


@jax_op(name="mix_rows", grad=_weighted_back)
def mix_rows(y: Any, weights: Any, order: Any, places: Any) -> Any:
    """Add up each token's rows, by weights, in float32.

    Args:
        y: (rows, features).
        weights: (tokens, k).
        order, places: see `rows_by_expert`.

    Returns:
        (tokens, features).
    """
    rows = y[places].astype(np.float32) * weights[..., None].astype(np.float32)
    return rows.sum(1).astype(y.dtype)
