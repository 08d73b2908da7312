"""Reading and masking logits of given tokens, several for each row."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from popxl.custom import jax_op


@jax_op(name="select_logits")
def select_logits(logits: Any, ids: Any) -> Any:
    """Read logits[i, ids[i, j]], 0 where an id is out of range.

    Args:
        logits: (n, classes).
        ids: int32 (n, k).

    Returns:
        (n, k) in the dtype of the logits.
    """
    nearest = jnp.clip(ids, 0, logits.shape[1] - 1)
    return jnp.where(ids == nearest, jnp.take_along_axis(logits, nearest, 1), 0)


@jax_op(name="mask_logits")
def mask_logits(logits: Any, ids: Any, *, value: float) -> Any:
    """Set logits[i, ids[i, j]] to `value`; ids out of range are left out.

    Args:
        logits: (n, classes).
        ids: int32 (n, k).

    Returns:
        (n, classes) in the dtype of the logits.
    """
    classes = logits.shape[1]
    columns = jnp.where((ids >= 0) & (ids < classes), ids, classes)
    rows = jnp.arange(logits.shape[0], dtype=ids.dtype)[:, None]
    return logits.at[rows, columns].set(value, mode="drop")
