"""Rounding of an updated value to its variable's dtype; the one place for it."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from popxl._ir.op_registry import NoGrad
from popxl.ops._numerics import check_floating, check_number

NO_GRAD = NoGrad("variable updates are not differentiated")


def to_float32_array(x: Any) -> Any:
    """Returns a float value in float32, in which updates are computed; numbers become arrays."""
    array = jnp.asarray(x)
    check_floating(array)
    return array.astype(jnp.promote_types(array.dtype, jnp.float32))


def update_operands(t: Any, *values: Any) -> list[Any]:
    """Returns a variable and its update's operands in the dtype in which updates are computed.

    That is the variable's if all are integers, and float32 otherwise. None remains.
    """
    integer = jnp.issubdtype(t.dtype, jnp.integer)
    given = [_as_array(v, integer) for v in (t, *values)]
    for x in given:
        if x is not None:
            check_number(x)
    whole = all(jnp.issubdtype(x.dtype, jnp.integer) for x in given if x is not None)
    return [x if x is None else x.astype(t.dtype if whole else jnp.float32) for x in given]


def _as_array(value: Any, integer: bool) -> Any:
    """Converts a number to an array; an integer array for integer variables."""
    if integer and isinstance(value, float) and value.is_integer():
        return jnp.asarray(int(value))
    return value if value is None else jnp.asarray(value)


def round_to_variable(value: Any, t: Any, rounding: tuple[Any, Any] | None = None) -> Any:
    """Rounds an updated value to the dtype of its variable `t`.

    Args:
        value: the new value, float32.
        t: the old value; its dtype is that of the result.
        rounding: seed of the run, uint32 (2,), and number of the update (see
            `Op.can_round_stochastically`), for a `t` of 16 bits; None: round to nearest.
    """
    if rounding is None:
        return value.astype(t.dtype)
    from popxl.ops.var_updates._rounding import round_stochastically

    return round_stochastically(value, t, *rounding)
