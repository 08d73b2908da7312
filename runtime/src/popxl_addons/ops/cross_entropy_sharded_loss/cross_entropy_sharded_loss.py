"""Cross entropy of logits whose vocabulary is sharded over replicas."""

from __future__ import annotations

from typing import Literal

import numpy as np

import popxl
from popxl import ReplicaGrouping, Tensor, ops
from popxl.ops._label_logits import shifted_label_logits
from popxl.ops.collectives.collectives import CollectiveOps
from popxl_addons.ops.replicated_all_reduce_TP.replicated_all_reduce_TP import (
    define_identical_grad_inputs,
    emit_all_reduce,
)
from popxl_addons.utils import cast_if_needed

__all__ = ["cross_entropy_sharded_loss"]

REDUCTION_TYPE = Literal["mean", "sum", "none"]

# The gradient of a sum over the shards is the same for each of them: the identity.
_SUM_OVER_SHARDS = define_identical_grad_inputs("cross_entropy_sum_over_shards")


def _all_reduce(t: Tensor, group: ReplicaGrouping | None, op: CollectiveOps = "add") -> Tensor:
    return emit_all_reduce(_SUM_OVER_SHARDS, t, op, group)


def cross_entropy_sharded_loss(
    logits: Tensor,
    indices: Tensor,
    ignore_index: Tensor | None = None,
    replica_grouping: ReplicaGrouping | None = None,
    reduction: REDUCTION_TYPE = "mean",
    available_memory_proportion: float = 0.4,
    label_smoothing: float = 0.0,
    num_classes: int | None = None,
) -> Tensor:
    """Compute cross entropy of vocabulary-sharded logits without gathering them.

    Four numbers for each position are exchanged: the largest logit, the sum of exponentials, the
    label's logit and whether there is one. The gradient, softmax - onehot on each replica's part of
    the vocabulary, needs no communication.

    Args:
        logits: (n, vocabulary / group size): this replica's part.
        indices: integers (n,): the labels minus the first label of this replica's part. An index
            outside [0, vocabulary / group size) is a label of another replica's part. Positions of
            a label of no part count neither in the sum nor in the mean.
        ignore_index: the value of `indices` (a scalar, with this replica's offset subtracted as
            well) whose positions do not count either.
        replica_grouping: replicas that hold the parts, in the order of the vocabulary; default:
            all.
        reduction: "mean" or "sum" over positions, giving a scalar, or "none", giving (n,).
        available_memory_proportion: no effect.
        label_smoothing: share e of the target distribution that is uniform over all classes, as
            `torch.nn.CrossEntropyLoss` has it: the loss is (1 - e) times the cross entropy of the
            label plus e times the mean of that of every class (Szegedy et al., arXiv:1512.00567).
        num_classes: size of the vocabulary that is smoothed over, if it is padded at the end;
            default: all of the group's logits.

    Returns:
        The loss in the dtype of `logits`, identical on the replicas of a group. It is computed in
        float32.

    Raises:
        ValueError: shapes that do not fit, or an unknown reduction.
    """
    if logits.rank != 2 or indices.shape != logits.shape[:1]:
        raise ValueError(
            "cross_entropy_sharded_loss takes logits (n, classes) and indices (n,), but got "
            f"{logits.shape} and {indices.shape}"
        )
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"unknown reduction {reduction!r}: use 'mean', 'sum' or 'none'")
    wide = cast_if_needed(logits, popxl.float32)
    # Any shift gives the same loss, so no gradient flows through the maximum.
    largest = ops.detach(ops.max(wide, axis=-1, keepdims=True))
    shift = ops.detach(ops.collectives.replicated_all_reduce(largest, "max", replica_grouping))
    total = _all_reduce(ops.sum(ops.exp(wide - shift), axis=-1), replica_grouping)
    indices = cast_if_needed(indices, popxl.int32)
    labels = _all_reduce(shifted_label_logits(wide, shift, indices), replica_grouping)
    counted = _valid_label_mask(ops.detach(labels[1]), indices, ignore_index)
    expected = labels[0]
    if label_smoothing:
        mean = _mean_over_classes(wide - shift, replica_grouping, num_classes)
        expected = expected * (1 - label_smoothing) + mean * label_smoothing
    losses = ops.where(counted, ops.log(total) - expected, popxl.constant(0, popxl.float32))
    return _apply_reduction(losses, counted, reduction, logits.dtype)


def _mean_over_classes(
    logits: Tensor, group: ReplicaGrouping | None, num_classes: int | None
) -> Tensor:
    """Compute the mean over the first `num_classes` of all replicas' logits: (n, c) -> (n,)."""
    group = group or popxl.gcg().ir.replica_grouping()
    local = logits.shape[-1]
    padded = local * group.group_size
    num_classes = num_classes or padded
    if num_classes < padded:
        is_class = popxl.constant(np.arange(padded) < num_classes, popxl.float32, "is_class")
        local_is_class = ops.collectives.replicated_slice(is_class, 0, group)
        logits = logits * local_is_class.reshape((1, local))
    return _all_reduce(ops.sum(logits, axis=-1), group) / float(num_classes)


def _valid_label_mask(
    is_somewhere: Tensor, indices: Tensor, ignore_index: Tensor | int | None
) -> Tensor:
    """True where a label is a class of the vocabulary and not ignored: bool (n,)."""
    counted = ops.greater(is_somewhere, popxl.constant(0, is_somewhere.dtype))
    if ignore_index is None:
        return counted
    if not isinstance(ignore_index, Tensor):
        ignore_index = popxl.constant(ignore_index, popxl.int32)
    ignored = ops.equal(indices, cast_if_needed(ignore_index, popxl.int32))
    return ops.logical_and(counted, ops.logical_not(ignored))


def _apply_reduction(
    losses: Tensor, counted: Tensor, reduction: REDUCTION_TYPE, dtype: popxl.dtype
) -> Tensor:
    """Reduce per-position losses to their mean or sum, or not at all, by `reduction`."""
    loss = losses if reduction == "none" else ops.sum(losses)
    if reduction == "mean":
        count = ops.sum(ops.cast(counted, popxl.float32))
        loss = loss / ops.maximum(count, popxl.constant(1, popxl.float32))
    return cast_if_needed(loss, dtype)
