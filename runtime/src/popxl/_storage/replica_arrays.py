"""Conversion between variables' host arrays and global device arrays over all replicas."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import jax
import numpy as np

from popxl._devices.cpu import force_copy
from popxl._devices.mesh import global_shape
from popxl._ir.host_data import device_view

if TYPE_CHECKING:
    from jax.sharding import NamedSharding, Sharding

    from popxl.tensor import Variable


Item = TypeVar("Item")


def put_array(x: np.ndarray, sharding: Sharding) -> jax.Array:
    """Returns a device array of global value `x`; each process passes at least its local part.

    The array owns its memory: `x` may change afterwards, and the array can be donated and updated
    in place.
    """
    return put_async(x, sharding).block_until_ready()


def put_async(x: np.ndarray, sharding: Sharding) -> jax.Array:
    """Returns a device array like `put_array`; `x` must not change until the array is ready."""
    return jax.make_array_from_callback(x.shape, sharding, lambda index: force_copy(x[index]))


def put_shards(
    shard_of_replica: Callable[[int], np.ndarray], shard_like: np.ndarray, sharding: NamedSharding
) -> jax.Array:
    """Returns a global array (see `global_shape`) from `part(replica)`, like `put_array`.

    Args:
        shard_of_replica: returns a replica's array; called for the replicas of this process.
        shard_like: an array with the shape and dtype of each part.
    """
    return put_shards_async(shard_of_replica, shard_like, sharding).block_until_ready()


def put_shards_async(
    shard_of_replica: Callable[[int], np.ndarray], shard_like: np.ndarray, sharding: NamedSharding
) -> jax.Array:
    """Returns a global array like `put_shards`; the shards must not change until it is ready."""
    replicas = sharding.mesh.devices.size
    full = global_shape(replicas, shard_like.shape)
    if not shard_like.size:
        return put_async(np.zeros(full, shard_like.dtype), sharding)
    rows = full[0] // replicas

    def shard_at(index: tuple[slice, ...]) -> np.ndarray:
        value = shard_of_replica((index[0].start or 0) // rows)
        return force_copy(value if value.ndim else value[None])

    return jax.make_array_from_callback(full, sharding, shard_at)


def local_data(x: jax.Array) -> np.ndarray:
    """Returns this process's part of a global array that is sharded along axis 0."""
    if x.is_fully_addressable:
        return np.asarray(x)
    shards = sorted(x.addressable_shards, key=lambda s: s.index[0].start or 0)
    return np.concatenate([np.asarray(s.data) for s in shards])


def _shard_group(var: Variable, replica: int) -> tuple[tuple[int, ...], int]:
    """Returns the replicas that hold one variable value's shards, and the index of `replica`.

    The index is the one among those replicas.
    """
    const = var._grouping.const_rg
    members = const.groups[const.assignment[replica]]
    return members, members.index(replica)


def _padded_shard(full: np.ndarray, shards: int, index: int) -> np.ndarray:
    flat = full.reshape(-1)
    size = -(-flat.size // shards)
    part = flat[index * size : (index + 1) * size]
    return part if part.size == size else np.concatenate(
        [part, np.zeros(size - part.size, flat.dtype)]
    )  # fmt: skip


def replica_value(var: Variable, value: np.ndarray, replica: int) -> np.ndarray:
    """Returns what `replica` stores of a variable's `value`: its group's value, or a shard."""
    group = var._grouping.assignment[replica]
    data = value[group] if var._grouping.num_groups > 1 else value
    if not var._sharded:
        return data
    shards = var._num_shards
    return _padded_shard(data, shards, _shard_group(var, replica)[1] % shards)


def put_variable(
    var: Variable, value: np.ndarray, shape: tuple[int, ...], sharding: NamedSharding
) -> jax.Array:
    """Returns a global device array of a variable's `value`; each replica's part has `shape`."""
    spec = np.broadcast_to(device_view(np.zeros(1, value.dtype)).reshape(()), shape)
    return put_shards(
        lambda replica: device_view(replica_value(var, value, replica)).reshape(shape),
        spec,
        sharding,
    )


def replica_shards(
    x: jax.Array, replicas: int, shape: tuple[int, ...], only_replica: int | None = None
) -> dict[int, np.ndarray]:
    """Returns the local parts of a global array by replica; just one if `only_replica` is given.

    On CPU these are views of the array's memory: while one exists, a program that updates the
    array in place would copy it instead.
    """
    if not x.size:  # of which JAX does not say where its parts begin
        return dict.fromkeys(range(replicas), np.empty(shape, x.dtype))
    rows = x.shape[0] // replicas
    parts: dict[int, np.ndarray] = {}
    for shard in x.addressable_shards:
        replica = (shard.index[0].start or 0) // rows
        if only_replica not in (None, replica):
            continue
        # JAX caches the host copy in the array that it was made from: this one is dropped at once.
        held = jax.make_array_from_single_device_arrays(
            shard.data.shape, shard.data.sharding, [shard.data]
        )
        parts[replica] = np.asarray(held).reshape(shape)
    return parts


def assemble_host_value(var: Variable, replica_part: Any) -> np.ndarray:
    """Returns a variable's host array, assembled from each replica's data, `per_replica(replica)`.

    That is the part that a replica stores.
    """
    values = [_full_value(var, r, replica_part) for r in _retrieved_replicas(var)]
    return values[0] if len(values) == 1 else np.stack(values)


def _retrieved_replicas(var: Variable) -> list[int]:
    """Returns the replicas whose values are assembled into a variable's host array."""
    if var._retrieval == "all_replicas":
        return list(range(len(var._grouping.assignment)))
    return [members[0] for members in var._grouping.groups]


def replicas_to_assemble(var: Variable) -> list[int]:
    """Returns, in order, the replicas whose data `assemble_host_value` needs for a variable."""
    needed: dict[int, None] = {}
    for replica in _retrieved_replicas(var):
        needed.update(
            dict.fromkeys(_replicas_with_shards(var, replica) if var._sharded else [replica])
        )
    return sorted(needed)


class IdentityTuple(tuple[Item, ...]):
    """A tuple that is compared and hashed by identity, since it can be long."""

    __slots__ = ()
    __eq__ = object.__eq__
    __ne__ = object.__ne__
    __hash__ = object.__hash__


class VariableShard(NamedTuple):
    """A shard of a variable's value: an element range, and the replicas that hold it.

    Attributes:
        group: of the variable's replica grouping.
        start, size: range of elements of the group's value, in C order.
        processes: processes whose replicas hold the shard.
        replicas: replicas that hold the shard.
    """

    group: int
    start: int
    size: int
    processes: tuple[int, ...]
    replicas: tuple[int, ...]


def variable_shards(var: Variable, owners: tuple[int, ...]) -> IdentityTuple[VariableShard]:
    """Returns the shards of a variable; equally sharded variables get the same object.

    Args:
        owners: the process of each replica; they need not exist now.
    """
    groups, shard_groups = (
        tuple(map(tuple, grouping.groups)) for grouping in (var._grouping, var._grouping.const_rg)
    )
    shards = var._num_shards if var._sharded else 1
    return _build_shards(groups, shard_groups, shards, math.prod(var.shape), owners)


@lru_cache(2**12)
def _build_shards(
    groups: tuple[tuple[int, ...], ...],
    shard_groups: tuple[tuple[int, ...], ...],
    shards: int,
    size: int,
    owners: tuple[int, ...],
) -> IdentityTuple[VariableShard]:
    index = {replica: i for members in shard_groups for i, replica in enumerate(members)}
    shard_size = max(-(-size // shards), 1)
    parts = []
    for group, members in enumerate(groups):
        shard_replicas: list[list[int]] = [[] for _ in range(shards)]
        for replica in members:
            shard_replicas[index[replica] % shards].append(replica)
        for held, start in zip(shard_replicas, range(0, max(size, 1), shard_size), strict=False):
            processes = tuple(sorted({owners[r] for r in held}))
            part = VariableShard(
                group, start, min(shard_size, size - start), processes, tuple(held)
            )
            parts.append(part)
    return IdentityTuple(parts)


def _full_value(var: Variable, replica: int, replica_part: Any) -> np.ndarray:
    if not var._sharded:
        return replica_part(replica).reshape(var.shape)
    flat = np.concatenate(
        [replica_part(r).reshape(-1) for r in _replicas_with_shards(var, replica)]
    )
    return flat[: math.prod(var.shape)].reshape(var.shape)


def _replicas_with_shards(var: Variable, replica: int) -> tuple[int, ...]:
    """Returns the replicas whose shards together make the variable value of `replica`'s shard."""
    members, index = _shard_group(var, replica)
    first = index - index % var._num_shards
    return members[first : first + var._num_shards]
