"""The one place where an updated value is rounded to the dtype of its variable."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from popxl._core.opdef import NoGrad
from popxl.ops._numerics import check_floating

NO_GRAD = NoGrad("variable updates are not differentiated")


def wide(x: Any) -> Any:
    """A float value in float32, in which all updates are computed. Numbers become arrays."""
    array = jnp.asarray(x)
    check_floating(array)
    return array.astype(jnp.promote_types(array.dtype, jnp.float32))


def store(value: Any, dtype: Any) -> Any:
    """Round an updated value to the dtype of its variable."""
    return value.astype(dtype)
