"""Cross entropy of logits."""

from __future__ import annotations

from typing import Literal

import popxl
from popxl import ops

__all__ = ["cross_entropy", "cross_entropy_with_grad"]

REDUCTION_TYPE = Literal["mean", "sum", "none"]


def cross_entropy(
    x: popxl.Tensor,
    labels: popxl.Tensor,
    ignore_index: int | None = None,
    reduction: REDUCTION_TYPE = "mean",
) -> popxl.Tensor:
    """Compute negative log-likelihoods of `labels` under softmax(x) along the last axis.

    Args:
        x: logits, (..., classes).
        labels: integers, (...). Positions of a label outside [0, classes) count neither in the sum
            nor in the mean.
        ignore_index: a label whose positions do not count either.
        reduction: "mean" or "sum" over all positions, giving a scalar, or "none".
    """
    log_probs = x - ops.logsumexp(x, axis=-1, keepdims=True)
    return ops.nll_loss(log_probs, labels, ignore_index, reduction, log_prob=True)


def cross_entropy_with_grad(
    x: popxl.Tensor,
    labels: popxl.Tensor,
    loss_scaling: float | popxl.Tensor = 1,
    ignore_index: int | None = None,
    reduction: REDUCTION_TYPE = "mean",
) -> tuple[popxl.Tensor, popxl.Tensor]:
    """Compute `cross_entropy` and the gradient of the loss together.

    Args:
        loss_scaling: gradient of the loss itself: the factor on the returned gradient.

    Returns:
        The loss (not scaled), and the gradient of `loss_scaling * loss` with respect to `x`.
    """
    probs = ops.softmax(x, axis=-1)
    return ops.nll_loss_with_softmax_grad(probs, labels, loss_scaling, ignore_index, reduction)
