"""The one place where an updated value is rounded to the dtype of its variable."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from popxl._core.opdef import NoGrad
from popxl.ops._numerics import check_floating
from popxl.ops.var_updates import _rounding

NO_GRAD = NoGrad("variable updates are not differentiated")


def wide(x: Any) -> Any:
    """A float value in float32, in which all updates are computed. Numbers become arrays."""
    array = jnp.asarray(x)
    check_floating(array)
    return array.astype(jnp.promote_types(array.dtype, jnp.float32))


def store(value: Any, t: Any, rounding: tuple[Any, Any] | None = None) -> Any:
    """Round an updated value to the dtype of its variable.

    Args:
        value: the new value, float32.
        t: the old value; its dtype is that of the result.
        rounding: seed of the run, uint32 (2,), and number of the update (see
            `popxl._lower.rounding`), for a `t` of 16 bits; None: round to nearest.
    """
    if rounding is None:
        return value.astype(t.dtype)
    return _rounding.at_random(value, t, *rounding)
