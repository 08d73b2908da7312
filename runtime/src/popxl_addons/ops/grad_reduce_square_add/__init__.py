"""Squared norm of gradients."""

from popxl_addons.ops.grad_reduce_square_add.grad_reduce_square_add import (
    grad_reduce_square_add as grad_reduce_square_add,
)
