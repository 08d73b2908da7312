"""Reading and masking logits of given tokens, several for each row."""

from __future__ import annotations

from typing import Any

import numpy as np

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
    nearest = ids.clip(0, logits.shape[1] - 1)
    return (ids == nearest) * logits[_rows(logits), nearest]


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
    is_class = (ids >= 0) & (ids < classes)
    columns = is_class * ids + ~is_class * classes
    return logits.at[_rows(logits), columns].set(value, mode="drop")


def _rows(logits: Any) -> np.ndarray:
    return np.arange(logits.shape[0], dtype=np.int32)[:, None]
