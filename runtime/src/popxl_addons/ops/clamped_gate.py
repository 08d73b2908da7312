"""The gate of gpt-oss's experts (OpenAI, arXiv:2508.10925)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from popxl.custom import jax_op


def _parts(both: Any, limit: float, slope: float) -> tuple[Any, ...]:
    """In float32: gate and up, both again clamped, and the sigmoid."""
    gate, up = jnp.split(both.astype(jnp.float32), 2, -1)
    low = jnp.minimum(gate, limit)
    return gate, up, low, jnp.clip(up, -limit, limit), jax.nn.sigmoid(slope * low)


def _back(xs: Any, ys: Any, dys: Any, *, limit: float, slope: float) -> Any:
    """Where a number is at its limit, its gradient passes, as torch has it."""
    gate, up, low, within, share = _parts(xs[0], limit, slope)
    dy = dys[0].astype(jnp.float32)
    of_gate = dy * (within + 1) * share * (1 + slope * low * (1 - share))
    d_gate = jnp.where(gate <= limit, of_gate, 0)
    d_up = jnp.where(jnp.abs(up) <= limit, dy * low * share, 0)
    return (jnp.concatenate([d_gate, d_up], -1).astype(xs[0].dtype),)


@jax_op(name="clamped_gate", grad=_back)
def clamped_gate(both: Any, *, limit: float, slope: float) -> Any:
    """gate * sigmoid(slope * gate) * (up + 1), computed in float32.

    Args:
        both: (..., 2 * features), gate and then up.
        limit: the gate is cut off above it, up outside of +-limit.

    Returns:
        (..., features), of the dtype of `both`.
    """
    _, _, low, within, share = _parts(both, limit, slope)
    return (low * share * (within + 1)).astype(both.dtype)
