"""All-reduce among tensors on the virtual devices of one replica."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce as fold
from typing import Any

import jax.numpy as jnp

from popxl._ir.op import Op
from popxl._ir.op_registry import define
from popxl.ops._emit import emit
from popxl.ops._numerics import upcast_half_types
from popxl.ops.collectives.collectives import CollectiveOps, to_collective_op
from popxl.ops.placement import init
from popxl.tensor import Tensor

_FOLD = {
    "add": jnp.add,
    "mean": jnp.add,
    "square_add": jnp.add,
    "mul": jnp.multiply,
    "min": jnp.minimum,
    "max": jnp.maximum,
    "and": jnp.logical_and,
    "or": jnp.logical_or,
}


def _lower(*xs: Any, op: CollectiveOps, forward: bool, backward: bool) -> tuple[Any, ...]:
    """Lowers the op: returns the reduced tensors if `forward`, else the tensors unchanged."""
    if not forward:
        return xs
    terms = [upcast_half_types(x) for x in xs]
    total = fold(_FOLD[op], [x * x for x in terms] if op == "square_add" else terms)
    if op == "mean":
        total = total / jnp.asarray(len(xs), total.dtype)
    return (total.astype(xs[0].dtype),) * len(xs)


def _grad(ctx: Any, op: Op, *dys: Tensor | None) -> Sequence[Tensor | None]:
    """Returns the all-reduced gradients if `backward`, else the gradients unchanged."""
    if op.attrs["op"] != "add":
        raise NotImplementedError(f"all_reduce with op={op.attrs['op']!r} has no gradient")
    if not op.attrs["backward"]:
        return list(dys)
    return all_reduce(
        [
            dy if dy is not None else init(t.shape, t.dtype)
            for dy, t in zip(dys, op.outputs, strict=True)
        ]
    )


_DEF = define("all_reduce", _lower, grad=_grad, dtypes="same", tags=("all_reduce",))


def _emit(
    ts: list[Tensor], ipus: list[int] | None, op: CollectiveOps, forward: bool, backward: bool
) -> list[Tensor]:
    if ipus is not None and len(ipus) != len(ts):
        raise ValueError(f"all_reduce got {len(ts)} tensors but {len(ipus)} IPUs")
    attrs = {"op": to_collective_op(op), "forward": forward, "backward": backward}
    ipu_ids = [t._ipu for t in ts]
    outs = _emit_unplaced(ts, attrs)
    for out, ipu_id in zip(outs, ipus or ipu_ids, strict=True):
        out._ipu = ipu_id
    return outs


def _emit_unplaced(ts: list[Tensor], attrs: dict[str, Any]) -> list[Tensor]:
    """Adds the op without the check of placement, since its tensors are on different IPUs."""
    ipu_ids = [t._ipu for t in ts]
    for t in ts:
        t._ipu = None
    try:
        return list(emit(_DEF, ts, attrs))
    finally:
        for t, ipu_id in zip(ts, ipu_ids, strict=True):
            t._ipu = ipu_id


def all_reduce(
    ts: list[Tensor], ipus: list[int] | None = None, op: CollectiveOps = "add"
) -> list[Tensor]:
    """Reduces tensors that are on different virtual devices; each device gets the result.

    Args:
        ts: tensors of one shape and dtype.
        ipus: their devices; default: taken from the tensors.
    """
    return _emit(ts, ipus, op, forward=True, backward=True)


def all_reduce_identical_inputs(
    ts: list[Tensor], ipus: list[int] | None = None, op: CollectiveOps = "add"
) -> list[Tensor]:
    """Returns the tensors unchanged; the gradient is an all-reduce. Opens a sharded computation."""
    return _emit(ts, ipus, op, forward=False, backward=True)


def all_reduce_identical_grad_inputs(
    ts: list[Tensor], ipus: list[int] | None = None, op: CollectiveOps = "add"
) -> list[Tensor]:
    """All-reduces the tensors; the gradient is the identity. Closes a sharded computation."""
    return _emit(ts, ipus, op, forward=True, backward=False)
