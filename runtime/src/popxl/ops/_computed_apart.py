"""Values that several kernels of a GPU compute, each for itself, instead of reading them.

XLA for GPUs writes the result of dear ops, such as tanh, to memory where several kernels use it,
and does not join the kernels. Those that compute it themselves it joins: with the same inputs they
are one kernel, in which LLVM finds that they compute the same.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from popxl._ir.op_registry import define
from popxl.ops._emit import emit
from popxl.ops._reductions import traced_platform
from popxl.tensor import Tensor


def _shift_by_zero(x: Any, times: int) -> Any:
    """Returns x, which only LLVM sees: XLA takes away other operations without an effect."""
    if traced_platform() not in ("gpu", "cuda"):
        return x
    bits = lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    for _ in range(times):
        bits = lax.shift_left(bits, jnp.zeros_like(bits))
    return lax.bitcast_convert_type(bits, x.dtype)


_SHIFT_BY_ZERO = define(
    "shift_by_zero",
    _shift_by_zero,
    infer=lambda spec, times: [spec],
    grad=lambda ctx, op, dy: [dy],
    tags=("elementwise",),
)


def computed_apart(t: Tensor, number: int = 1) -> Tensor:
    """Returns the value of `t`, for a kernel that computes it itself.

    Args:
        number: of the kernel; that of `t` has 0.

    Returns:
        `t` unless an elementwise op makes it.
    """
    op = t._producer
    if op is None or "elementwise" not in op.defn.tags or not op.inputs:
        return t
    first, *others = op.inputs
    apart = emit(_SHIFT_BY_ZERO, [first], {"times": number})
    return emit(op.defn, [*apart, *others], op.attrs)[0]
