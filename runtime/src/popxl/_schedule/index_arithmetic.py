"""Integer arithmetic on the host for loop counters and remote-buffer offsets.

The host folds sums, differences, products, quotients and remainders of counters and constants, with
the device's wrap-around. Everything else is computed by XLA, and the host waits for it. Host
scalars have one element and are Python ints.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from popxl.tensor import Constant

if TYPE_CHECKING:
    from popxl._ir.op import Op
    from popxl.tensor import Tensor, TensorSpec

Rule = Callable[..., tuple[int, ...]]


def _remainder(x: int, y: int) -> int:
    """Returns the remainder with the sign of `x`, as XLA does; `x` if `y` is 0."""
    return x if y == 0 else (abs(x) % abs(y)) * (1 if x >= 0 else -1)


def _quotient(x: int, y: int) -> int:
    """Returns `x` / `y` rounded toward zero, as XLA does; -1 for division by zero."""
    return -1 if y == 0 else abs(x) // abs(y) * (1 if (x >= 0) == (y >= 0) else -1)


_FOLDED: dict[str, Callable[..., int]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": _quotient,
    "fmod": _remainder,
    "negate": operator.neg,
    "cast": operator.pos,
    "reshape": operator.pos,
    "identity": operator.pos,
}


def is_host_scalar_spec(spec: TensorSpec) -> bool:
    """True if a spec has one integer or bool element, so that the host can compute its value."""
    return math.prod(spec.shape) == 1 and np.dtype(spec.dtype.as_jax()).kind in "iub"


def host_scalar_constant(t: Tensor) -> int | None:
    """Returns the integer that a constant holds; None if it is not one integer or bool."""
    return int(t._data.item()) if isinstance(t, Constant) and is_host_scalar_spec(t.spec) else None


def host_scalar_function(op: Op) -> Rule | None:
    """Returns a function that computes an op on host integers; None if the op has none.

    It maps the op's inputs to a tuple of its outputs.
    """
    if "hint" in op.defn.tags:
        return tuple
    function = _FOLDED.get(op.defn.name)
    if function is None or op.inplace is not None or op.view:
        return None
    if not all(is_host_scalar_spec(t.spec) for t in (*op.inputs, *op.outputs)):
        return None
    (out,) = op.outputs
    dtype = np.dtype(out.dtype.as_jax())
    if dtype.kind == "b":
        return None
    limits = np.iinfo(dtype)
    return partial(_compute_wrapped, function, int(limits.min), 2**limits.bits)


def _compute_wrapped(
    function: Callable[..., int], low: int, count: int, *numbers: int
) -> tuple[int, ...]:
    """Returns the integer result of `function`, wrapped to the range [low, low + count)."""
    return ((function(*numbers) - low) % count + low,)
