"""Negative log-likelihood."""

from __future__ import annotations

import math
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from popxl._ir.op_registry import NoGrad, define
from popxl.ops._emit import emit
from popxl.ops._numerics import check_floating, upcast_half_types
from popxl.ops._scalars import emit_with_scalars, with_scalars
from popxl.tensor import Tensor

REDUCTION_TYPE = Literal["mean", "sum", "none"]
REDUCTION_MAP = {name: name for name in ("mean", "sum", "none")}

# Probabilities below the smallest normal float32 count as that: a loss of 87, not infinity.
_SMALLEST = float(np.finfo(np.float32).tiny)


def _valid_label_mask(probs: Any, labels: Any, ignore_index: int | None) -> Any:
    """Returns 1.0 for labels that count in the loss, 0.0 for ignored or out-of-range ones."""
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"labels are integers, not {labels.dtype}: use ops.cast")
    class_ids = labels.astype(jnp.int32)
    counted = (class_ids >= 0) & (class_ids < probs.shape[-1])
    if ignore_index is not None:
        counted &= class_ids != ignore_index
    return counted.astype(jnp.float32)


def _check_classes(probs: Any) -> None:
    check_floating(probs)
    if not probs.ndim or not probs.shape[-1]:
        raise ValueError(f"probs are (..., classes), but have shape {probs.shape}")


def _label_probability(probs: Any, labels: Any) -> Any:
    if probs.shape[:-1] != labels.shape:
        raise ValueError(f"labels {labels.shape} must have the shape of probs {probs.shape} "
                         "without the last axis")  # fmt: skip
    at = jnp.clip(labels.astype(jnp.int32), 0, probs.shape[-1] - 1)
    return jnp.take_along_axis(probs, at[..., None], -1)[..., 0]


def _label_weight(counted: Any, reduction: str) -> Any:
    """Returns each label's weight in the loss: for the mean, 1 / (number of counted labels)."""
    return counted / jnp.maximum(jnp.sum(counted), 1.0) if reduction == "mean" else counted


def _nll(probs: Any, labels: Any, ignore_index: int | None, reduction: str, log_prob: bool) -> Any:
    _check_classes(probs)
    picked = _label_probability(upcast_half_types(probs), labels)
    log_likelihood = picked if log_prob else jnp.log(jnp.maximum(picked, _SMALLEST))
    # `where`, since 0 * inf of an ignored label would be NaN
    counted = _valid_label_mask(probs, labels, ignore_index)
    losses = jnp.where(counted > 0, -log_likelihood * _label_weight(counted, reduction), 0.0)
    return (losses if reduction == "none" else jnp.sum(losses)).astype(probs.dtype)


_NLL = define("nll_loss", _nll, result="loss")


def nll_loss(
    probs: Tensor,
    labels: Tensor,
    ignore_index: int | None = None,
    reduction: REDUCTION_TYPE = "mean",
    log_prob: bool = False,
) -> Tensor:
    """Returns the negative log-likelihood of the labels.

    Args:
        probs: (..., classes), probabilities (usually a softmax), or their logarithms.
        labels: (...), integer classes. Those outside [0, classes) do not count, neither in the sum
            nor in the mean, and have no gradient.
        ignore_index: labels of this value do not count either.
        reduction: "mean" over the labels that count, "sum", or "none".
        log_prob: `probs` are logarithms.

    Returns:
        A scalar, or for "none" a tensor of the shape of `labels`; the dtype is that of `probs`.

    Raises:
        ValueError: an unknown reduction.
        SpecError: shapes or dtypes do not fit.
    """
    _check_reduction("nll_loss", reduction)
    attrs = {"ignore_index": ignore_index, "reduction": reduction, "log_prob": bool(log_prob)}
    return emit(_NLL, [probs, labels], attrs)[0]


@with_scalars
def _nll_with_grad(
    probs: Any, labels: Any, ignore_index: int | None, reduction: str, loss_grad: Any = 1.0
) -> tuple[Any, Any]:
    _check_classes(probs)
    rows = probs.shape[:-1]
    if labels.size != math.prod(rows):
        raise ValueError(f"labels {labels.shape} must be one for each row of probs {probs.shape}")
    by_row = labels.reshape(rows)
    loss = _nll(probs, by_row, ignore_index, reduction, log_prob=False)
    weights = _label_weight(
        _valid_label_mask(probs, by_row, ignore_index), reduction
    ) * upcast_half_types(jnp.asarray(loss_grad))
    hit = jnp.arange(probs.shape[-1]) == by_row.astype(jnp.int32)[..., None]
    dx = (upcast_half_types(probs) - hit) * weights[..., None]
    loss = loss.reshape(labels.shape) if reduction == "none" else loss
    return loss, dx.astype(probs.dtype)


_NLL_WITH_GRAD = define(
    "nll_loss_with_softmax_grad",
    _nll_with_grad,
    grad=NoGrad("it returns the gradient itself"),
    result=lambda op: ("loss", "dx"),
)


def nll_loss_with_softmax_grad(
    probs: Tensor,
    labels: Tensor,
    loss_grad: float | Tensor = 1,
    ignore_index: int | None = None,
    reduction: REDUCTION_TYPE = "mean",
) -> tuple[Tensor, Tensor]:
    """Returns the negative log-likelihood, and its gradient at the input of the softmax.

    Args:
        probs: (..., classes), the output of a softmax over the last axis.
        labels: integer classes of any shape, one for each row of `probs`.
        loss_grad: gradient of the loss, a number or a scalar tensor: the loss scale.
        ignore_index, reduction: as for `nll_loss`; the loss of "none" has the shape of `labels`.

    Returns:
        The loss, and dE/dx of the shape and dtype of `probs`.
    """
    _check_reduction("nll_loss_with_softmax_grad", reduction)
    attrs = {"ignore_index": ignore_index, "reduction": reduction}
    loss, dx = emit_with_scalars(_NLL_WITH_GRAD, [probs, labels], {"loss_grad": loss_grad}, attrs)
    return loss, dx


def _check_reduction(op: str, reduction: str) -> None:
    if reduction not in REDUCTION_MAP:
        raise ValueError(f"{op}: reduction must be 'mean', 'sum' or 'none', not {reduction!r}")
