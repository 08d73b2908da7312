"""One tensor's term of the squared global gradient norm, unscaled."""

from __future__ import annotations

import popxl
from popxl import ops
from popxl_addons.utils import cast_if_needed

__all__ = ["grad_reduce_square_add"]


def grad_reduce_square_add(
    t: popxl.Tensor, loss_scaling: int | float | popxl.Tensor
) -> popxl.Tensor:
    """Sum the squares of `t / loss_scaling` in float32, a scalar.

    Add the results of all gradients (over replicas too, if they hold parts of them); the square
    root of the total is the global norm.

    Args:
        t: a gradient of any floating-point type. It is divided in float32 before it is squared, so
            that half types neither overflow nor lose small values.
        loss_scaling: by which the loss was multiplied.
    """
    if isinstance(loss_scaling, popxl.Tensor):
        loss_scaling = cast_if_needed(loss_scaling, popxl.float32)
    return ops.sumsquare(cast_if_needed(t, popxl.float32) / loss_scaling, keepdims=False)
