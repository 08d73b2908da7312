"""Copy update: overwrites a variable with a tensor."""

# ruff: noqa: N803 - names of PopXL's arguments
from __future__ import annotations

from typing import Any

from popxl._ir.op_registry import define
from popxl.ops._emit import emit
from popxl.tensor import Tensor


def _copy(t: Any, x: Any) -> Any:
    if (t.shape, t.dtype) != (x.shape, x.dtype):
        raise ValueError(
            f"{t.dtype}{list(t.shape)} cannot become a copy of {x.dtype}{list(x.shape)}"
        )
    return x


_COPY = define(
    "copy_var_update",
    _copy,
    grad=lambda ctx, op, dy: [None, dy],
    tags=("elementwise",),
    result="updated__{t}",
)


def copy_var_update_(t: Tensor, X: Tensor) -> Tensor:
    """Sets t = X in place and returns the updated tensor; shapes and dtypes must be equal."""
    return emit(_COPY, [t, X], inplace=0)[0]
