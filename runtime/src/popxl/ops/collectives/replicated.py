"""Collectives among the replicas of a group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from popxl._ir.op import Op
from popxl._ir.op_registry import define
from popxl._ir.sharding import MetaShape, shard_count, shard_elements
from popxl.ops import _collective as collective
from popxl.ops._args import check_tensors, normalize_axis
from popxl.ops._emit import emit
from popxl.ops._grads import divide_by_count
from popxl.ops.collectives.collectives import (
    SUMS,
    CollectiveOps,
    group_or_all,
    reduce,
    sum_over_group,
    to_collective_op,
)
from popxl.replica_grouping import ReplicaGrouping
from popxl.tensor import Tensor, TensorSpec


def _pad_to_shards(x: jax.Array, group: ReplicaGrouping) -> jax.Array:
    """Flattens an array and pads it with zeros to a multiple of the group size."""
    flat = x.reshape(-1)
    size = shard_elements(x.shape, group.group_size)
    return jnp.pad(flat, (0, size * group.group_size - flat.size))


def _shard_spec(spec: TensorSpec, group: ReplicaGrouping) -> TensorSpec:
    """Returns the spec of one replica's shard, with the full shape as its meta shape."""
    count = group.group_size
    return TensorSpec(
        (shard_elements(spec.shape, count),), spec.dtype, MetaShape(spec.shape, count)
    )


def _same_spec(spec: TensorSpec, **_: Any) -> list[TensorSpec]:
    return [spec]


# ---- all-reduce ---------------------------------------------------------------------------------
def _all_reduce_grad(ctx: Any, op: Op, dy: Tensor | None) -> Sequence[Tensor | None]:
    # Each replica's input reaches every replica's output: gradients are summed over the group.
    kind, group = op.attrs["op"], op.attrs["group"]
    if kind not in ("add", "mean"):
        raise NotImplementedError(f"replicated_all_reduce with op={kind!r} has no gradient")
    assert dy is not None
    return [replicated_all_reduce(dy, kind, group)]


ALL_REDUCE = define(
    "replicated_all_reduce",
    reduce,
    infer=_same_spec,
    grad=_all_reduce_grad,
    tags=("collective", "all_reduce"),
    result="{t}_all_reduce",
)


def replicated_all_reduce(
    t: Tensor, op: CollectiveOps = "add", group: ReplicaGrouping | None = None
) -> Tensor:
    """Reduces `t` over the replicas of a group; each replica gets the result.

    Args:
        op: "add", "mean", "mul", "min", "max", "and", "or" or "square_add" (sum of squares).
        group: default: all replicas.
    """
    attrs = {"op": to_collective_op(op), "group": group_or_all(group)}
    return emit(ALL_REDUCE, [t], attrs)[0]


def replicated_all_reduce_(
    t: Tensor, op: CollectiveOps = "add", group: ReplicaGrouping | None = None
) -> Tensor:
    """Reduces `t` in place, like `replicated_all_reduce`."""
    attrs = {"op": to_collective_op(op), "group": group_or_all(group)}
    return emit(ALL_REDUCE, [t], attrs, inplace=0)[0]


def _is_single_replica(op: Op) -> bool:
    """True if the op's group has one replica, so that the collective is the identity."""
    return op.attrs["group"].group_size == 1 and op.outputs[0].shape == op.inputs[0].shape


# ---- all-gather ---------------------------------------------------------------------------------
def _lower_gather(
    x: jax.Array, group: ReplicaGrouping, axis: int, shape: str, meta_shape: tuple[int, ...]
) -> jax.Array:
    if shape == "meta_shape":
        full = collective.all_gather(x.reshape(-1), group)
        return full[: math.prod(meta_shape)].reshape(meta_shape)
    return collective.all_gather(x, group, axis, tiled=shape == "concat")


def _infer_gather(
    spec: TensorSpec, group: ReplicaGrouping, axis: int, shape: str, meta_shape: tuple[int, ...]
) -> list[TensorSpec]:
    if shape == "meta_shape":
        return [TensorSpec(meta_shape, spec.dtype)]
    dims = list(spec.shape)
    if shape == "new_axis":
        dims.insert(axis, group.group_size)
    else:
        dims[axis] *= group.group_size
    return [TensorSpec(dims, spec.dtype)]


def _gather_grad(ctx: Any, op: Op, dy: Tensor | None) -> Sequence[Tensor | None]:
    # As in PopXL: replicas hold equal gradients of what was gathered, so nothing is summed.
    assert dy is not None
    if op.attrs["shape"] == "meta_shape":
        local_slice = replica_sharded_slice(dy, op.attrs["group"])
    else:
        local_slice = replicated_slice(dy, op.attrs["axis"], op.attrs["group"])
    return [local_slice.reshape(op.inputs[0].shape)]


ALL_GATHER = define(
    "replicated_all_gather",
    _lower_gather,
    infer=_infer_gather,
    grad=_gather_grad,
    tags=("collective", "all_gather"),
    is_identity=_is_single_replica,
    result="{t}_all_gathered",
)


def replicated_all_gather(
    t: Tensor,
    axis: int = 0,
    group: ReplicaGrouping | None = None,
    output_shape: Literal["new_axis", "concat", "meta_shape", "auto"] = "auto",
) -> Tensor:
    """Gathers `t` from the replicas of a group, in rank order; each replica gets the result.

    The gradient is this replica's own slice of the result's gradient, which all replicas are taken
    to hold alike: a program whose replicas do not must sum it over the group.

    Args:
        axis: where to put or extend the axis of replicas, for "new_axis" and "concat".
        group: default: all replicas.
        output_shape: "new_axis": stack along a new axis; "concat": extend `axis`; "meta_shape":
            join flat shards to the whole tensor of `t.meta_shape`; "auto": "meta_shape" if `t` has
            one, otherwise "concat". Of a whole that is cut into fewer shards than the group has
            replicas, consecutive replicas hold one copy.

    Raises:
        ValueError: an unknown `output_shape`, or "meta_shape" for a tensor that has none, or whose
            shards the group does not hold.
    """
    check_tensors("replicated_all_gather", t)
    if output_shape == "auto":
        output_shape = "meta_shape" if t.meta_shape else "concat"
    if output_shape not in ("new_axis", "concat", "meta_shape"):
        raise ValueError(f"unknown output_shape {output_shape!r}")
    if output_shape == "meta_shape" and not t.meta_shape:
        raise ValueError(f"{t.id!r} is no shard: it has no meta_shape to gather to")
    if output_shape == "concat" and t.rank == 0:
        t, axis = t.reshape((1,)), 0
    axis = normalize_axis("replicated_all_gather", t, axis, extra_axes=output_shape == "new_axis")
    group = group_or_all(group)
    if output_shape == "meta_shape":
        group = group._split_groups(shard_count(t.meta_shape, t.nelms, group.group_size))
    attrs = {
        "group": group,
        "axis": axis,
        "shape": output_shape,
        "meta_shape": tuple(t.meta_shape),
    }
    return emit(ALL_GATHER, [t], attrs)[0]


# ---- reduce-scatter -----------------------------------------------------------------------------
def _lower_scatter(x: jax.Array, op: str, group: ReplicaGrouping, sharded: bool) -> jax.Array:
    if op in SUMS:
        return sum_over_group(_pad_to_shards(x, group), op, group, collective.reduce_scatter)
    return _lower_shard(reduce(x, op, group), group)  # type: ignore[arg-type]


def _infer_scatter(
    spec: TensorSpec, op: str, group: ReplicaGrouping, sharded: bool
) -> list[TensorSpec]:
    shard = _shard_spec(spec, group)
    return [shard if sharded else TensorSpec(shard.shape, spec.dtype)]


def _scatter_grad(ctx: Any, op: Op, dy: Tensor | None) -> Sequence[Tensor | None]:
    assert dy is not None
    if op.attrs["op"] not in ("add", "mean"):
        raise NotImplementedError("replicated_reduce_scatter: only add and mean have a gradient")
    shape, group = op.inputs[0].shape, op.attrs["group"]
    full = replicated_all_gather(dy.flatten(), 0, group, "concat")
    full = full[: math.prod(shape)].reshape(shape)
    return [full if op.attrs["op"] == "add" else divide_by_count(full, group.group_size)]


REDUCE_SCATTER = define(
    "replicated_reduce_scatter",
    _lower_scatter,
    infer=_infer_scatter,
    grad=_scatter_grad,
    tags=("collective", "reduce_scatter"),
    result="{t}_reduce_scattered",
)


def replicated_reduce_scatter(
    t: Tensor,
    op: CollectiveOps = "add",
    group: ReplicaGrouping | None = None,
    configure_output_for_replicated_tensor_sharding: bool = False,
) -> Tensor:
    """Reduces `t` over a group; each replica gets its shard of the flattened result.

    Args:
        op: as for `replicated_all_reduce`.
        configure_output_for_replicated_tensor_sharding: mark the result as a shard of a tensor of
            `t`'s shape, so that it can be used with sharded variables and gathered back.

    Returns:
        Flat tensor of ceil(t.nelms / group size) elements; the last shard is padded with zeros.
    """
    attrs = {
        "op": to_collective_op(op),
        "group": group_or_all(group),
        "sharded": configure_output_for_replicated_tensor_sharding,
    }
    return emit(REDUCE_SCATTER, [t], attrs)[0]


# ---- slices -------------------------------------------------------------------------------------
def _lower_shard(x: jax.Array, group: ReplicaGrouping) -> jax.Array:
    size = shard_elements(x.shape, group.group_size)
    return lax.dynamic_slice(_pad_to_shards(x, group), (collective.rank(group) * size,), (size,))


SHARD = define(
    "replica_sharded_slice",
    _lower_shard,
    infer=lambda spec, group: [_shard_spec(spec, group)],
    grad=lambda ctx, op, dy: [
        replicated_all_gather(dy, 0, op.attrs["group"], "concat")[: op.inputs[0].nelms].reshape(
            op.inputs[0].shape
        )
    ],
    tags=("collective", "slice"),
    result="{t}_sharded_slice",
)


def replica_sharded_slice(t: Tensor, group: ReplicaGrouping | None = None) -> Tensor:
    """Returns this replica's shard of `t`, without communication.

    Returns:
        Flat tensor of ceil(t.nelms / group size) elements with `meta_shape` = `t.shape`.
    """
    return emit(SHARD, [t], {"group": group_or_all(group)})[0]


def _lower_slice(x: jax.Array, axis: int, group: ReplicaGrouping) -> jax.Array:
    size = x.shape[axis] // group.group_size
    local_slice = lax.dynamic_slice_in_dim(x, collective.rank(group) * size, size, axis)
    return local_slice.squeeze(axis) if size == 1 else local_slice


def _infer_slice(spec: TensorSpec, axis: int, group: ReplicaGrouping) -> list[TensorSpec]:
    if spec.shape[axis] % group.group_size:
        raise ValueError(
            f"axis {axis} of size {spec.shape[axis]} cannot be cut into {group.group_size} slices"
        )
    dims = list(spec.shape)
    dims[axis] //= group.group_size
    if dims[axis] == 1:
        del dims[axis]
    return [TensorSpec(dims, spec.dtype)]


def _slice_grad(ctx: Any, op: Op, dy: Tensor | None) -> Sequence[Tensor | None]:
    assert dy is not None
    axis, group = op.attrs["axis"], op.attrs["group"]
    dims = list(op.inputs[0].shape)
    dims[axis] //= group.group_size
    return [replicated_all_gather(dy.reshape(dims), axis, group, "concat")]


SLICE = define(
    "replicated_slice",
    _lower_slice,
    infer=_infer_slice,
    grad=_slice_grad,
    tags=("collective", "slice"),
)


def replicated_slice(t: Tensor, axis: int = 0, group: ReplicaGrouping | None = None) -> Tensor:
    """Returns this replica's slice of `t` along `axis`, by its rank in the group.

    Slices of length 1 have no such axis: (4, 4, 3) over 4 replicas gives (4, 3).

    Raises:
        ValueError: the axis is not divisible by the group size.
    """
    attrs = {"axis": normalize_axis("replicated_slice", t, axis), "group": group_or_all(group)}
    return emit(SLICE, [t], attrs)[0]
