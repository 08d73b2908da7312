"""Clamp with a straight-through gradient."""

from __future__ import annotations

from typing import Any

from popxl.custom import jax_op


def _straight_through_grad(xs: Any, ys: Any, dys: Any, *, limit: float) -> Any:
    return dys


@jax_op(name="saturate", grad=_straight_through_grad)
def saturate(t: Any, *, limit: float) -> Any:
    """Clamp t to [-limit, limit], with a straight-through gradient.

    A gradient graph needs neither `t` nor the result, so that none of their inputs is recomputed
    for it.
    """
    return t.clip(-limit, limit)
