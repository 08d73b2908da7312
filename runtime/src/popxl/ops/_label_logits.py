"""Logit of each row's label, for cross entropy over sharded classes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from popxl import dtypes
from popxl._ir.op import Op
from popxl._ir.op_registry import define
from popxl.ops._emit import emit
from popxl.ops.logic import equal, where
from popxl.ops.shape import reshape
from popxl.tensor import constant

if TYPE_CHECKING:
    from popxl.tensor import Tensor


def _select_labels(t: Any, shift: Any, indices: Any) -> Any:
    at = jnp.clip(indices, 0, t.shape[1] - 1)
    picked = (jnp.take_along_axis(t, at[:, None], 1) - shift)[:, 0]
    is_here = indices == at
    return jnp.stack([jnp.where(is_here, picked, 0), is_here.astype(t.dtype)])


def _label_logits_grad(ctx: Any, op: Op, dy: Tensor) -> list[Tensor | None]:
    """Gradient of label selection by comparison, which XLA fuses with the softmax gradient."""
    t, _, indices = op.inputs
    n, classes = t.shape
    columns = constant(np.arange(classes)[None], dtypes.int32, "classes")
    chosen = equal(columns, reshape(ctx.fwd(indices), (n, 1)))
    return [where(chosen, reshape(dy[0], (n, 1)), constant(0, dy.dtype)), None, None]


_PICKED = define("cross_entropy_label", _select_labels, grad=_label_logits_grad)


def shifted_label_logits(t: Tensor, shift: Tensor, label_indices: Tensor) -> Tensor:
    """Returns t[i, indices[i]] - shift[i], and 1, for each row i; 0 and 0 if out of range.

    No gradient flows to the shift.

    Args:
        t: (n, classes).
        shift: (n, 1).
        label_indices: int32 (n,).

    Returns:
        (2, n).
    """
    return emit(_PICKED, [t, shift, label_indices])[0]
