"""All-reduces at the borders of a tensor-parallel region, with custom gradients.

Between them each replica of the group computes with its shard of the weights. Values outside are
identical on the replicas, and so are their gradients (Shoeybi et al., Megatron-LM, 2019, section 3,
where the two are called f and g).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from popxl import ReplicaGrouping, Tensor, TensorSpec, ops
from popxl._ir.op import Op
from popxl._ir.op_registry import OpDef, define
from popxl.ops._emit import emit
from popxl.ops.collectives.collectives import (
    CollectiveOps,
    group_or_all,
    reduce,
    to_collective_op,
)

__all__ = [
    "replicated_all_reduce",
    "replicated_all_reduce_identical_grad_inputs",
    "replicated_all_reduce_identical_inputs",
]


def define_identical_inputs(name: str, tags: Iterable[str] = ()) -> OpDef:
    """Define an op that is the identity and whose gradient is an all-reduce."""

    def grad(ctx: Any, op: Op, dy: Tensor) -> Sequence[Tensor | None]:
        return [emit(_as_reduce, [dy], op.attrs)[0]]

    _as_reduce = define(
        f"{name}_grad",
        reduce,
        infer=_same_spec,
        grad=lambda ctx, op, ddy: [ddy],
        tags=("collective", "all_reduce", *tags),
    )
    return define(name, lambda x, op, group: x, infer=_same_spec, grad=grad, tags=tags)


def define_identical_grad_inputs(name: str, tags: Iterable[str] = ()) -> OpDef:
    """Define an op that is an all-reduce and whose gradient is the identity."""
    return define(
        name,
        reduce,
        infer=_same_spec,
        grad=lambda ctx, op, dy: [dy],
        tags=("collective", "all_reduce", *tags),
    )


def _same_spec(spec: TensorSpec, **_: Any) -> list[TensorSpec]:
    return [spec]


_NEEDS = ("needs_patterns",)
_IDENTICAL_INPUTS = define_identical_inputs("replicated_all_reduce_identical_inputs", _NEEDS)
_IDENTICAL_GRAD_INPUTS = define_identical_grad_inputs(
    "replicated_all_reduce_identical_grad_inputs", _NEEDS
)


def emit_all_reduce(
    defn: OpDef, t: Tensor, op: CollectiveOps, group: ReplicaGrouping | None
) -> Tensor:
    """Add an op made by `define_identical_inputs` or `..._grad_inputs` to the current graph."""
    if op not in ("add", "mean"):
        raise ValueError(f"{defn.name} takes op='add' or 'mean', not {op!r}")
    attrs = {"op": to_collective_op(op), "group": group_or_all(group)}
    return emit(defn, [t], attrs)[0]


def replicated_all_reduce_identical_inputs(
    t: Tensor, op: CollectiveOps = "add", group: ReplicaGrouping | None = None
) -> Tensor:
    """Enter a tensor-parallel region: the identity, with an all-reduce as gradient.

    Args:
        t: a tensor with the same value on all replicas of a group.
        op: reduction of the gradients, "add" or "mean".
        group: replicas that compute together; default: all.
    """
    return emit_all_reduce(_IDENTICAL_INPUTS, t, op, group)


def replicated_all_reduce_identical_grad_inputs(
    t: Tensor, op: CollectiveOps = "add", group: ReplicaGrouping | None = None
) -> Tensor:
    """Leave a tensor-parallel region: an all-reduce, with the identity as gradient.

    Args:
        t: each replica's partial result.
        op: reduction, "add" or "mean".
        group: replicas that compute together; default: all.
    """
    return emit_all_reduce(_IDENTICAL_GRAD_INPUTS, t, op, group)


def replicated_all_reduce(
    t: Tensor, op: CollectiveOps = "add", group: ReplicaGrouping | None = None
) -> Tensor:
    """All-reduce in forward and backward pass, as `ops.collectives.replicated_all_reduce`."""
    return ops.collectives.replicated_all_reduce(t, op, group)
