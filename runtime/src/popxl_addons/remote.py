"""Variables in remote buffers (host memory): one entry per layer, loaded and stored by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import popxl
from popxl import ReplicaGrouping, ops
from popxl_addons.dot_tree import DotTree
from popxl_addons.graph import GraphWithNamedArgs
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.sharding import effective_shards

if TYPE_CHECKING:
    from popxl_addons.variable_factory import NamedVariableFactories, VariableFactory

__all__ = [
    "NamedRemoteBuffers",
    "create_remote_buffer",
    "load_remote",
    "load_remote_graph",
    "named_buffers",
    "named_variable_buffers",
    "store_remote",
    "store_remote_graph",
]


class NamedRemoteBuffers(DotTree[popxl.RemoteBuffer]):
    """A tree of remote buffers (host memory) by name."""


# ---- buffers ------------------------------------------------------------------------------------
def create_remote_buffer(
    spec: popxl.TensorSpec,
    entries: int = 1,
    replica_group: ReplicaGrouping | None = None,
    shard_over: int | None = None,
) -> popxl.RemoteBuffer:
    """Create a remote buffer for tensors of `spec`.

    Args:
        spec: of the whole tensor, or (with a `meta_shape`) of a replica's part.
        entries: number of tensors.
        replica_group: replicas that share a tensor; default: all.
        shard_over: cut whole tensors into so many parts, one for each of as many replicas of a
            group; default: over all replicas of a group; 1: keep them whole.

    Raises:
        ValueError: `shard_over` does not divide the number of elements, or the group size (that of
            `const_rg`, for a grouping without a stride).
    """
    group = popxl.gcg().ir.replica_grouping() if replica_group is None else replica_group
    shards = group.const_rg.group_size if shard_over is None else shard_over
    if not spec.meta_shape and shards > 1 and math.prod(spec.shape) % shards:
        raise ValueError(
            f"a tensor of shape {tuple(spec.shape)} cannot be cut into {shards} equal parts: pass "
            "shard_over=1 to keep it whole"
        )
    return create_buffer_for_spec(spec, entries, group, shards)


def create_buffer_for_spec(
    spec: popxl.TensorSpec, entries: int, group: ReplicaGrouping | None, shards: int
) -> popxl.RemoteBuffer:
    """Create a remote buffer for tensors of `spec`, full or as `shards` padded shards each."""
    if spec.meta_shape or shards == 1:
        buffer = popxl.remote_buffer(spec.shape, spec.dtype, entries)
        buffer.meta_shape = spec.meta_shape
        return buffer
    groups = 1 if group is None else group.const_rg.num_groups
    on_host = (*([groups] if groups > 1 else []), *spec.shape)
    return popxl.replica_sharded_buffer(on_host, spec.dtype, group, shards, entries)


def named_buffers(tensors: NamedTensors, entries: int = 1) -> NamedRemoteBuffers:
    """Create a remote buffer of `entries` entries for each tensor, under the tensor's name."""
    names, ts = tensors.unpack()
    return NamedRemoteBuffers.pack(
        names, [create_buffer_for_spec(t.spec, entries, None, 1) for t in ts]
    )


def named_variable_buffers(
    factories: NamedVariableFactories,
    entries: int = 1,
    shard_over_dict: Mapping[str, int] | int | bool = True,
    sharded_threshold: int = 0,
) -> NamedRemoteBuffers:
    """Create a remote buffer of `entries` entries for each factory's variables, by name.

    Args:
        shard_over_dict: over how many replicas variables are sharded: True: over their whole
            replica group; False: not; a number for all; or numbers by name, where variables that
            are not named are sharded over their whole group. Factories of sharded variables know
            their number. FP8 state stays whole, and so do variables whose elements cannot be
            shared evenly.
        sharded_threshold: of these, only variables of at least so many elements are sharded.

    Raises:
        ValueError: a number is less than 1 or more than a variable's group has replicas, or
            `shard_over_dict` is something else.
    """
    names, fs = factories.unpack()
    buffers = [
        _variable_buffer(f, entries, _num_shards(name, f, shard_over_dict, sharded_threshold))
        for name, f in zip(names, fs, strict=True)
    ]
    return NamedRemoteBuffers.pack(names, buffers)


def _num_shards(
    name: str, factory: VariableFactory, sharding: Mapping[str, int] | int | bool, threshold: int
) -> int:
    size = factory.replica_grouping.const_rg.group_size
    if isinstance(sharding, Mapping):
        sharding = sharding.get(name, True)
    if isinstance(sharding, bool):
        shards = size if sharding else 1
    elif isinstance(sharding, int) and 1 <= sharding <= size:
        shards = sharding
    else:
        raise ValueError(
            f"variable {name!r} cannot be sharded over {sharding!r}: shard_over_dict holds "
            f"a bool or a number of replicas from 1 to {size}, the size of the variable's groups"
        )
    if factory.replica_sharded:
        return factory.shard_over
    if factory.kind == "fp8" or math.prod(factory.shape_on_replica) < threshold:
        return 1
    return effective_shards(factory.shape_on_replica, shards)


def _variable_buffer(factory: VariableFactory, entries: int, shards: int) -> popxl.RemoteBuffer:
    whole = popxl.TensorSpec(factory.shape_on_replica, factory.dtype)
    return create_remote_buffer(whole, entries, factory.replica_grouping, shards)


# ---- load and store -----------------------------------------------------------------------------
def grow_buffer(buffer: popxl.RemoteBuffer, entries: int) -> None:
    """Enlarge a remote buffer to at least `entries` entries."""
    buffer.entries = max(buffer.entries, entries)


def _sort_by_name(buffers: NamedRemoteBuffers, entries: int) -> NamedRemoteBuffers:
    """Sort remote buffers by dotted name, and enlarge them to `entries` entries."""
    ordered = NamedRemoteBuffers.from_dict(dict(sorted(buffers.to_dict().items())))
    for buffer in ordered.values_flat():
        grow_buffer(buffer, entries)
    return ordered


def load_remote(
    buffers: NamedRemoteBuffers, entry: int | popxl.Tensor = 0, use_io_tiles: bool = False
) -> NamedTensors:
    """Load entry number `entry` of each remote buffer, in the current graph.

    Args:
        use_io_tiles: load on IO tiles and copy to compute tiles.
    """
    loaded = {}
    for name, buffer in buffers.to_dict().items():
        if use_io_tiles:
            with popxl.io_tiles():
                on_io = ops.remote_load(buffer, entry, name=name)
            loaded[name] = ops.io_tile_copy(on_io)
        else:
            loaded[name] = ops.remote_load(buffer, entry, name=name)
    return NamedTensors.from_dict(loaded)


def store_remote(
    buffers: NamedRemoteBuffers,
    tensors: NamedTensors,
    entry: int | popxl.Tensor = 0,
    use_io_tiles: bool = False,
) -> None:
    """Store each tensor to entry number `entry` of the remote buffer of its name.

    Raises:
        KeyError: a buffer has no tensor.
    """
    for name, buffer in buffers.to_dict().items():
        t = tensors.get(name)
        if use_io_tiles:
            t = ops.io_tile_copy(t)
            with popxl.io_tiles():
                ops.remote_store(buffer, entry, t)
        else:
            ops.remote_store(buffer, entry, t)


_ENTRY = popxl.TensorSpec((), popxl.int32)


def load_remote_graph(
    buffers: NamedRemoteBuffers, entries: int = 1, use_io_tiles: bool = False
) -> tuple[GraphWithNamedArgs, list[str]]:
    """Create a graph that loads the same entry of each remote buffer, by its number.

    Args:
        entries: buffers with fewer entries are grown to so many.
        use_io_tiles: load on IO tiles.

    Returns:
        The graph, whose only input is the index of the entry (a number or an int32 scalar), and
        the names of its outputs, which are sorted: `NamedTensors.pack(names, graph.call(entry))`.
    """
    ordered = _sort_by_name(buffers, entries)
    names = sorted(buffers.keys_flat())

    def load(entry: popxl.Tensor) -> list[popxl.Tensor]:
        loaded = load_remote(ordered, entry, use_io_tiles)
        return [loaded.get(name) for name in names]

    graph = popxl.gcg().ir.create_graph(load, _ENTRY)
    return GraphWithNamedArgs(graph), names


def store_remote_graph(
    buffers: NamedRemoteBuffers, entries: int = 1, use_io_tiles: bool = False
) -> GraphWithNamedArgs:
    """Create a graph that stores tensors to the same entry of each remote buffer, by its number.

    Args:
        entries: buffers with fewer entries are grown to so many.
        use_io_tiles: store from IO tiles.

    Returns:
        The graph, whose named inputs are the tensors, in the order of their names, and whose first
        input is the index of the entry: `graph.bind(tensors).call(entry)`.
    """
    names = sorted(buffers.keys_flat())
    bs = [_sort_by_name(buffers, entries).get(name) for name in names]
    specs = [popxl.TensorSpec(b.tensor_shape, b.tensor_dtype, b.meta_shape) for b in bs]

    def store(entry: popxl.Tensor, tensors: list[popxl.Tensor]) -> None:
        store_remote(buffers, NamedTensors.pack(names, tensors), entry, use_io_tiles)

    graph = popxl.gcg().ir.create_graph(store, _ENTRY, specs)
    return GraphWithNamedArgs(graph, NamedTensors.pack(names, graph.inputs[1:]))
