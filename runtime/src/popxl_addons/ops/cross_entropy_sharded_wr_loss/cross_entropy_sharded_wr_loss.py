"""Cross entropy of logits whose vocabulary is sharded over the IPUs of a replica."""

from __future__ import annotations

from collections.abc import Iterable

import popxl
from popxl import Tensor, ops
from popxl_addons.utils import cast_if_needed

__all__ = ["cross_entropy_sharded_wr_loss"]


def handle_ipus(ts: list[Tensor], ipus: Iterable[int] | None) -> list[int]:
    """Return the IPU of each tensor: the given one, else the one that the tensor is on.

    Raises:
        ValueError: another number of IPUs than tensors.
    """
    ipu_ids = [t.ipu for t in ts] if ipus is None else list(ipus)
    if len(ipu_ids) != len(ts):
        raise ValueError(f"{len(ts)} tensors are on as many IPUs, but {len(ipu_ids)} are given")
    return ipu_ids


def cross_entropy_sharded_wr_loss(
    logits: list[Tensor], indices: list[Tensor], ipus: Iterable[int] | None = None
) -> Tensor:
    """Compute cross entropy without reduction, on the first IPU.

    All virtual IPUs of a replica are one device here, so the parts are joined.

    Args:
        logits: (n, classes / parts) on each IPU.
        indices: (n,) on each IPU: the labels minus the first label of its part.
        ipus: where the parts are; default: taken from the logits.

    Returns:
        (n,), in the dtype of the logits.
    """
    from popxl_addons.ops.cross_entropy import cross_entropy

    ipu_ids = handle_ipus(logits, ipus)
    first = ipu_ids[0]
    here = [
        t if ipu_id == first else ops.ipu_copy(t, first, ipu_id)
        for t, ipu_id in zip(logits, ipu_ids, strict=True)
    ]
    # The first part begins with label 0: its indices are the labels.
    whole = here[0] if len(here) == 1 else ops.concat(here, axis=-1)
    loss = cross_entropy(cast_if_needed(whole, popxl.float32), indices[0], reduction="none")
    return cast_if_needed(loss, whole.dtype)
