"""Weight update of Adam and LAMB: subtracts an update scaled by LAMB's trust ratio."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from popxl._ir.op_registry import define
from popxl.ops._scalars import emit_with_scalars, with_scalars
from popxl.ops.var_updates._store import NO_GRAD, round_to_variable, to_float32_array
from popxl.tensor import Tensor


@with_scalars
def _adam_var_update(
    t: Any,
    x: Any,
    r1: Any,
    r2: Any,
    learning_rate: Any = 1.0,
    max_weight_norm: Any = None,
    rounding: Any = None,
) -> Any:
    weight_norm = jnp.sqrt(to_float32_array(r1).reshape(()))
    update_norm = jnp.sqrt(to_float32_array(r2).reshape(()))
    clipped = weight_norm
    if max_weight_norm is not None:
        clipped = jnp.minimum(weight_norm, to_float32_array(max_weight_norm))
    defined = (weight_norm > 0) & (update_norm > 0)
    ratio = jnp.where(defined, clipped / jnp.where(defined, update_norm, 1.0), 1.0)
    return round_to_variable(
        to_float32_array(t) - to_float32_array(learning_rate) * ratio * to_float32_array(x),
        t,
        rounding,
    )


_VAR_UPDATE = define(
    "adam_var_update", _adam_var_update, grad=NO_GRAD, rounds=True, tags=("elementwise",)
)


def adam_var_update(
    t: Tensor,
    x: Tensor,
    r1: Tensor,
    r2: Tensor,
    learning_rate: float | Tensor | None = None,
    max_weight_norm: float | Tensor | None = None,
) -> Tensor:
    """Updates t -= learning_rate * trust * x in place; LAMB's trust ratio: sqrt(r1) / sqrt(r2).

    Args:
        t: the weight.
        x: the update, from an updater such as `lamb_updater`.
        r1, r2: squared norms of the weight and of the update, see `ops.lamb_square`. If either is
            0, the ratio is 1.
        learning_rate: default 1.
        max_weight_norm: upper bound of sqrt(r1); default: none.

    Returns:
        The updated weight, an alias of `t`.
    """
    scalars = {"learning_rate": learning_rate, "max_weight_norm": max_weight_norm}
    return emit_with_scalars(_VAR_UPDATE, [t, x, r1, r2], scalars, inplace=0)[0]
