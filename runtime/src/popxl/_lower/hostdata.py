"""Between host arrays of variables and the arrays of all replicas."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from popxl._lower.devices import global_shape

if TYPE_CHECKING:
    from jax.sharding import NamedSharding, Sharding

    from popxl.tensor import Variable


_ADOPTED = 64  # bytes


def device_view(x: np.ndarray) -> np.ndarray:
    """Host data in the dtype that the device uses (float8 is a record on the host)."""
    from popxl import dtypes

    return x.view(dtypes.dtype.as_dtype(x.dtype).as_jax()) if x.dtype.names else x


def put(x: np.ndarray, sharding: Sharding) -> jax.Array:
    """A device array of global value `x`; each process passes at least its own part.

    The array owns its memory: `x` may change afterwards, and the array can be donated and updated
    in place.
    """
    return jax.make_array_from_callback(
        x.shape, sharding, lambda index: _to_be_copied(x[index])
    ).block_until_ready()


def put_parts(parts: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """As `put`, of (replicas, *shape): what each replica has (see `global_shape`)."""
    replicas, *shape = parts.shape
    whole = global_shape(replicas, tuple(shape))
    if not parts.size:
        return put(np.zeros(whole, parts.dtype), sharding)
    rows = whole[0] // replicas

    def part(index: tuple[slice, ...]) -> np.ndarray:
        found = parts[(index[0].start or 0) // rows]
        return _to_be_copied(found if found.ndim else found[None])

    return jax.make_array_from_callback(whole, sharding, part).block_until_ready()


def _to_be_copied(x: np.ndarray) -> np.ndarray:
    """The same values where XLA will copy them.

    On CPU, XLA adopts a host array that happens to lie on an `_ADOPTED` boundary, even if asked
    not to alias; adopted memory cannot be donated, so that the program would copy it instead.
    """
    x = np.asarray(x, order="C")
    if x.ctypes.data % _ADOPTED or not x.nbytes:
        return x
    out = staging(x.shape, x.dtype)
    out[...] = x
    return out


def staging(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Zeros in memory that XLA will copy, as for `_to_be_copied`."""
    dtype = np.dtype(dtype)
    nbytes = math.prod(shape) * dtype.itemsize
    memory = np.zeros(nbytes + 2 * _ADOPTED, np.uint8)
    start = -memory.ctypes.data % _ADOPTED + dtype.itemsize
    return memory[start : start + nbytes].view(dtype).reshape(shape)


def fetch(x: jax.Array) -> np.ndarray:
    """The value of an array, or of this process's part of it (other parts are zeros)."""
    if x.is_fully_addressable:
        return np.asarray(x)
    out = np.zeros(x.shape, x.dtype)
    for shard in x.addressable_shards:
        out[shard.index] = np.asarray(shard.data)
    return out


def _members(var: Variable, replica: int) -> tuple[tuple[int, ...], int]:
    """The replicas that share the shards of a variable with `replica`, and its place among them."""
    const = var._grouping.const_rg
    members = const.groups[const.assignment[replica]]
    return members, members.index(replica)


def replica_values(var: Variable) -> np.ndarray:
    """(replicas, ...): what each replica holds of a variable on the device at first."""
    value, groups = var._value(), var._grouping.assignment
    if var._sharded:
        return np.stack([stored_entry(var, value, replica) for replica in range(len(groups))])
    if var._grouping.num_groups == 1:
        return np.broadcast_to(value, (len(groups), *value.shape))
    return value[np.asarray(groups)]


def _shard(whole: np.ndarray, shards: int, index: int) -> np.ndarray:
    flat = whole.reshape(-1)
    size = -(-flat.size // shards)
    part = flat[index * size : (index + 1) * size]
    return part if part.size == size else np.concatenate(
        [part, np.zeros(size - part.size, flat.dtype)]
    )  # fmt: skip


def stored_entry(var: Variable, value: np.ndarray, replica: int) -> np.ndarray:
    """What `replica` stores of a variable's `value`: its group's, or its shard of it."""
    group = var._grouping.assignment[replica]
    data = value[group] if var._grouping.num_groups > 1 else value
    if not var._sharded:
        return data
    shards = var._shards
    return _shard(data, shards, _members(var, replica)[1] % shards)


def entry_values(var: Variable, replicas: int, shape: tuple[int, ...]) -> np.ndarray:
    """(replicas, *shape): what each replica stores of a remote variable's value."""
    value = var._value()
    if var._grouping.num_groups == 1 and not var._sharded:
        return np.broadcast_to(device_view(value.reshape(shape)), (replicas, *shape))
    parts = [stored_entry(var, value, replica) for replica in range(replicas)]
    return np.stack([device_view(part.reshape(shape)) for part in parts])


def replica_parts(x: jax.Array, replicas: int, shape: tuple[int, ...]) -> list[np.ndarray]:
    """What each replica holds, of `shape`; zeros for those of other processes.

    On CPU these are views of the array's memory: while one exists, a program that updates the
    array in place would copy it instead.
    """
    rows = max(x.shape[0] // replicas, 1)
    parts = [np.broadcast_to(np.zeros((), x.dtype), shape)] * replicas
    for shard in x.addressable_shards:
        # JAX keeps what it copies from a device with the array that was asked for it; this array
        # goes at once.
        held = jax.make_array_from_single_device_arrays(
            shard.data.shape, shard.data.sharding, [shard.data]
        )
        parts[(shard.index[0].start or 0) // rows] = np.asarray(held).reshape(shape)
    return parts


def host_value(var: Variable, per_replica: Any) -> np.ndarray:
    """The host array of a variable from `per_replica(replica) -> what that replica stores`."""
    groups = var._grouping.groups
    if var._retrieval == "all_replicas":
        values = [_whole(var, r, per_replica) for r in range(len(var._grouping.assignment))]
    else:
        values = [_whole(var, members[0], per_replica) for members in groups]
    return values[0] if len(values) == 1 else np.stack(values)


def _whole(var: Variable, replica: int, per_replica: Any) -> np.ndarray:
    if not var._sharded:
        return per_replica(replica).reshape(var.shape)
    shards = var._shards
    members, place = _members(var, replica)
    first = place - place % shards
    flat = np.concatenate([per_replica(r).reshape(-1) for r in members[first : first + shards]])
    return flat[: math.prod(var.shape)].reshape(var.shape)
