"""Batch serialisation: a loop over micro-batches, with a load before and a store after a graph.

The remote buffers of a serialised graph have `rows * steps` entries: a row for each place the
graph is used at (a layer), and in it an entry for each step (micro-batch).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import popxl
from popxl import DeviceToHostStream, HostToDeviceStream, RemoteBuffer, ReplicaGrouping, ops
from popxl_addons.grad_info import is_fwd
from popxl_addons.graph import GraphWithNamedArgs, names_of
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.remote import create_buffer_for_spec, grow_buffer
from popxl_addons.rts import gather_replica_sharded_tensor
from popxl_addons.transforms.autodiff import copy_input
from popxl_addons.utils import null_context as null_context
from popxl_addons.utils import suffix_graph_name

__all__ = [
    "BatchSerialResult",
    "RemoteHandle",
    "batch_serial_buffer",
    "batch_serialise",
    "batch_serialise_fwd_and_grad",
]

IoMode = Literal["compute", "io", "io_overlapped"]
RemoteBufferWithOffset = tuple[RemoteBuffer, int | None]


@dataclass(frozen=True)
class RemoteHandle:
    """Location of a tensor per loop step in a remote buffer: buffer, row offset, sharding.

    Attributes:
        buffer: the buffer.
        row_offset: added to the row index r that the serialised graph is called with: step i is
            at entry (r + row_offset) * steps + i. A function f from that index, an int32 scalar,
            to the row: f(r) * steps + i. None: entry i, whichever the row.
        shard_group: if entries are sharded: the replicas that hold the parts; default: all.
        adds: what is stored is added to what is there.
        grows: the buffer may have fewer entries than are needed: then it gets more.
    """

    buffer: RemoteBuffer
    row_offset: int | Callable[[popxl.Tensor], popxl.Tensor] | None = 0
    shard_group: ReplicaGrouping | None = None
    adds: bool = False
    grows: bool = True

    def entries(self, steps: int, rows: int) -> int:
        """Number of buffer entries that `rows` rows of `steps` loop steps need."""
        if self.row_offset is None:
            return steps
        offset = self.row_offset if isinstance(self.row_offset, int) else 0
        return steps * (offset + rows)


OfRow = Callable[[popxl.Tensor], popxl.Tensor]
"""An input that depends on the row alone, an int32 scalar, and is made of it."""

LoadHandle = HostToDeviceStream | RemoteBufferWithOffset | RemoteHandle | OfRow
StoreHandle = RemoteBufferWithOffset | RemoteHandle


@dataclass(frozen=True)
class BatchSerialResult:
    """A graph that loops over micro-batches, and the mapping from the original graph's inputs.

    Attributes:
        graph: takes the row index (int32 scalar), the number of the first step (int32 scalar, if
            asked for), the seed (uint32 (2,), if there is one), then the other inputs of the
            original graph that are not loaded, in their order. It has no outputs.
            `graph.bind(weights).call(row, seed)`; the row may be a number.
        stored_buffers: where tensors of the original graph are stored.
    """

    graph: GraphWithNamedArgs
    stored_buffers: dict[popxl.Tensor, RemoteHandle]
    _inputs: dict[popxl.Tensor, popxl.Tensor] = field(default_factory=dict, repr=False)

    def remap_tensors(self, ts: NamedTensors) -> NamedTensors:
        """Map inputs of the original graph to the inputs of the serialised graph.

        Raises:
            KeyError: a tensor is no input of the serialised graph.
        """
        return ts.remap(self._inputs)


def batch_serial_buffer(
    t: popxl.Tensor, steps: int = 1, rows: int = 1, shard_group: ReplicaGrouping | None = None
) -> RemoteBuffer:
    """Create a remote buffer of `rows` x `steps` entries for tensors such as `t`.

    Args:
        shard_group: replicas for which `t` has the same value: each keeps its part of it.
    """
    shards = 1 if shard_group is None else shard_group.group_size
    return create_buffer_for_spec(t.spec, rows * steps, shard_group, shards)


# ---- one serialised graph -----------------------------------------------------------------------
def batch_serialise(
    graph: GraphWithNamedArgs,
    steps: int,
    load_handles: Mapping[popxl.Tensor, LoadHandle],
    store_streams: Mapping[popxl.Tensor, DeviceToHostStream],
    store_buffers: Mapping[popxl.Tensor, StoreHandle],
    seed_input: popxl.Tensor | None = None,
    rows: int = 1,
    io_mode: IoMode = "io",
    numbered: bool = False,
) -> BatchSerialResult:
    """Create a graph that loops over micro-batches: it loads, calls `graph`, and stores.

    Args:
        steps: number of calls.
        load_handles: where inputs of `graph` come from in each step, or what gives them.
        store_streams, store_buffers: where outputs go in each step. Outputs in neither are
            dropped.
        seed_input: input of `graph` that is a seed. Each step gets its own, which depends only on
            the seed and the step, so that a gradient graph draws the same numbers.
        rows: number of rows. Buffers with fewer entries than they need are grown.
        io_mode: "compute", "io" or "io_overlapped": where transfers happen. A hint: XLA overlaps
            transfers with computation by itself, and results are the same.
        numbered: the serialised graph takes the number of its first step, from which steps' seeds
            follow; else that is 0. For several calls that share the steps of a batch. Without
            a seed there is no such input.

    Raises:
        ValueError: a key is no input (or output) of the graph, or a number or mode is wrong.
    """
    _check_mode(steps, rows, io_mode)
    _check_keys("load_handles", load_handles, graph.graph.inputs, graph)
    for name, keys in (("store_streams", store_streams), ("store_buffers", store_buffers)):
        _check_keys(name, keys, (*graph.graph.outputs, *graph.graph.inputs), graph)
    loop = _SerialLoopBuilder(
        graph,
        steps,
        rows,
        loads={t: _as_handle(h) for t, h in load_handles.items()},
        streams=dict(store_streams),
        stores={t: _as_handle(h) for t, h in store_buffers.items()},
        seeds=() if seed_input is None else (seed_input,),
        use_io_tiles=io_mode != "compute",
        numbered=numbered,
    )
    return loop.result()


def batch_serialise_non_overlapped(
    graph: GraphWithNamedArgs,
    steps: int,
    load_handles: Mapping[popxl.Tensor, LoadHandle],
    store_streams: Mapping[popxl.Tensor, DeviceToHostStream],
    store_buffers: Mapping[popxl.Tensor, StoreHandle],
    seed_input: popxl.Tensor | None = None,
    rows: int = 1,
    use_io_tiles: bool = False,
) -> BatchSerialResult:
    """Serialise a graph with io_mode "io" or, without IO tiles, "compute"."""
    io_mode: IoMode = "io" if use_io_tiles else "compute"
    return batch_serialise(
        graph, steps, load_handles, store_streams, store_buffers, seed_input, rows, io_mode
    )


def batch_serialise_overlapped(
    graph: GraphWithNamedArgs,
    steps: int,
    load_handles: Mapping[popxl.Tensor, LoadHandle],
    store_streams: Mapping[popxl.Tensor, DeviceToHostStream],
    store_buffers: Mapping[popxl.Tensor, StoreHandle],
    seed_input: popxl.Tensor | None = None,
    rows: int = 1,
) -> BatchSerialResult:
    """Serialise a graph with io_mode "io_overlapped"; see `batch_serialise`."""
    return batch_serialise(
        graph, steps, load_handles, store_streams, store_buffers, seed_input, rows, "io_overlapped"
    )


def _check_mode(steps: int, rows: int, io_mode: str) -> None:
    if steps < 1 or rows < 1:
        raise ValueError(f"steps and rows must be at least 1, but are {steps} and {rows}")
    if io_mode not in get_args(IoMode):
        raise ValueError(f"unknown io_mode {io_mode!r}: use one of {', '.join(get_args(IoMode))}")


def _check_keys(
    argument_name: str, keys: Mapping[popxl.Tensor, Any], allowed: Any, graph: GraphWithNamedArgs
) -> None:
    for t in keys:
        if t not in allowed:
            raise ValueError(f"{argument_name}: {t!r} cannot be used with graph {graph.graph.id!r}")


def _as_handle(handle: Any) -> Any:
    """Convert a stream, buffer, handle or (buffer, row offset) to a stream or a `RemoteHandle`."""
    if isinstance(handle, tuple):
        buffer, offset = handle
        return RemoteHandle(buffer, offset)
    return RemoteHandle(handle) if isinstance(handle, RemoteBuffer) else handle


@dataclass
class _SerialLoopBuilder:
    """Builds a loop over a graph; the inputs `seeds` get another random seed in each step."""

    graph: GraphWithNamedArgs
    steps: int
    rows: int
    loads: dict[popxl.Tensor, HostToDeviceStream | RemoteHandle | OfRow]
    streams: dict[popxl.Tensor, DeviceToHostStream]
    stores: dict[popxl.Tensor, RemoteHandle]
    seeds: Sequence[popxl.Tensor]
    use_io_tiles: bool
    numbered: bool = False

    def result(self) -> BatchSerialResult:
        inner = self.graph.graph
        for handle in (*self.loads.values(), *self.stores.values()):
            if isinstance(handle, RemoteHandle) and handle.grows:
                grow_buffer(handle.buffer, handle.entries(self.steps, self.rows))
        others = [t for t in inner.inputs if t not in self.loads and t not in self.seeds]
        invariants = [*self.seeds, *others]
        body = self._build_iteration(invariants)
        with inner.ir._new_current_graph(suffix_graph_name(inner.name, "batch_serial")) as serial:
            row, first = self._row_input(), self._first_step_input()
            inputs = {t: copy_input(t) for t in invariants}
            start = popxl.constant(0, popxl.int32)
            ops.repeat(body, self.steps, start, row, *first, *inputs.values())
        args = {n: inputs[t] for n, t in self.graph.args.to_dict().items() if t in inputs}
        return BatchSerialResult(
            GraphWithNamedArgs(serial, NamedTensors.from_dict(args)), dict(self.stores), inputs
        )

    @staticmethod
    def _row_input() -> popxl.Tensor:
        return popxl.graph_input((), popxl.int32, "row")

    def _first_step_input(self) -> list[popxl.Tensor]:
        asked = self.numbered and self.seeds
        return [popxl.graph_input((), popxl.int32, "first_step")] if asked else []

    def _build_iteration(self, invariants: list[popxl.Tensor]) -> popxl.Graph:
        """Build one loop iteration's graph: (step, row, first step, invariants) -> next step."""
        inner = self.graph.graph
        with inner.ir._new_current_graph(
            suffix_graph_name(inner.name, "batch_serial_step")
        ) as body:
            step = popxl.graph_input((), popxl.int32, "step")
            row, first = self._row_input(), self._first_step_input()
            values = {t: copy_input(t) for t in invariants}
            for t in self.seeds:
                number = first[0] + step if first else step
                from popxl.ops.random import create_random_seed

                values[t] = create_random_seed(values[t], number)
            for t, source in self.loads.items():
                values[t] = self._load_input(t, source, step, row)
            outputs = ops.call(inner, inputs_dict=values)
            values.update(zip(inner.outputs, outputs, strict=True))
            for t, stream in self.streams.items():
                with self._io_tile_context():
                    ops.host_store(stream, values[t])
            for t, handle in self.stores.items():
                self._store_output(values[t], handle, step, row)
            popxl.graph_output(step + 1)
        return body

    def _io_tile_context(self) -> AbstractContextManager[Any]:
        return popxl.io_tiles() if self.use_io_tiles else nullcontext()

    def _load_input(
        self,
        t: popxl.Tensor,
        source: HostToDeviceStream | RemoteHandle | OfRow,
        step: popxl.Tensor,
        row: popxl.Tensor,
    ) -> popxl.Tensor:
        if isinstance(source, HostToDeviceStream):
            with self._io_tile_context():
                loaded = ops.host_load(source, t.name)
            return self._to_compute_tiles(loaded)
        if not isinstance(source, RemoteHandle):
            return source(row)
        loaded = self._entry_of(source, step, row, t.name)
        if t.meta_shape:
            return loaded
        return gather_replica_sharded_tensor(loaded, replica_group=source.shard_group)

    def _entry_of(
        self, handle: RemoteHandle, step: popxl.Tensor, row: popxl.Tensor, name: str | None = None
    ) -> popxl.Tensor:
        """Load a loop step's tensor from its remote-buffer entry: the local shard if sharded."""
        entry = self._buffer_entry(handle, step, row)
        with self._io_tile_context():
            loaded = ops.remote_load(handle.buffer, entry, name=name)
        return self._to_compute_tiles(loaded)

    def _to_compute_tiles(self, loaded: popxl.Tensor) -> popxl.Tensor:
        return ops.io_tile_copy(loaded) if self.use_io_tiles else loaded

    def _store_output(
        self,
        t: popxl.Tensor,
        handle: RemoteHandle,
        step: popxl.Tensor,
        row: popxl.Tensor,
    ) -> None:
        if handle.buffer.meta_shape and not t.meta_shape:
            t = ops.collectives.replica_sharded_slice(t, handle.shard_group)
        if handle.adds:
            t = self._entry_of(handle, step, row) + t
        entry = self._buffer_entry(handle, step, row)
        with self._io_tile_context():
            ops.remote_store(handle.buffer, entry, t)

    def _buffer_entry(
        self, handle: RemoteHandle, step: popxl.Tensor, row: popxl.Tensor
    ) -> popxl.Tensor:
        """Compute the number of a loop step's buffer entry, int32 scalar; see `RemoteHandle`."""
        offset = handle.row_offset
        if offset is None:
            return step
        if callable(offset):
            return offset(row) * self.steps + step
        return (row + offset if offset else row) * self.steps + step


# ---- a forward graph and its gradient -----------------------------------------------------------
def batch_serialise_fwd_and_grad(
    forward_graph: GraphWithNamedArgs,
    gradient_graph: GraphWithNamedArgs,
    named_inputs_for_grad_graph: NamedTensors,
    steps: int,
    load_handles: Mapping[popxl.Tensor, LoadHandle],
    store_streams: Mapping[popxl.Tensor, DeviceToHostStream],
    store_buffers: Mapping[popxl.Tensor, StoreHandle | ReplicaGrouping],
    seed_input: popxl.Tensor | None = None,
    rows: int = 1,
    io_mode: IoMode = "io",
    first_row: int = 0,
    numbered: bool = False,
) -> tuple[BatchSerialResult, BatchSerialResult]:
    """Serialise a forward graph and its gradient graph; remote buffers connect them.

    What the gradient graph expects from the forward graph is, in this order: a named input, if it
    is in `named_inputs_for_grad_graph`; loaded from where the forward graph loads or stores it; or
    stored by the forward graph in each step into a new buffer, be it computed there or an input,
    such as the step's seed. So the serialised gradient graph takes the row and named inputs, and
    nothing else: `grad.bind(weights_and_accumulators).call(row)`.

    Args:
        gradient_graph: a gradient graph of `forward_graph`, recomputing or not.
        named_inputs_for_grad_graph: inputs of `forward_graph` (its weights) that become arguments
            of the serialised gradient graph under these names; its other named inputs follow. A
            named seed is not stored: each step makes its own of it again.
        load_handles, store_streams, store_buffers: as for `batch_serialise`, by tensors of either
            graph. A ReplicaGrouping as value of `store_buffers` asks for a new buffer, sharded over
            these replicas.
        seed_input: input of `forward_graph` that is a seed.
        first_row: the first row that the graphs are called with: new buffers have none before it.
        numbered: as for `batch_serialise`; of the gradient graph, if it takes the seed.

    Returns:
        The serialised forward and gradient graphs.

    Raises:
        ValueError: as for `batch_serialise`; the graphs do not belong together; a gradient that the
            gradient graph takes is not in `load_handles`.
    """
    _check_mode(steps, rows, io_mode)
    backward = gradient_graph.graph
    _check_pair(forward_graph, gradient_graph, (*load_handles, *store_streams, *store_buffers))
    connect = _Connections(
        steps, range(first_row, rows), forward_graph, load_handles, store_buffers
    )
    grad_loads = {t: _as_handle(h) for t, h in load_handles.items() if t in backward}
    names = names_of(named_inputs_for_grad_graph)
    named, seeds = connect.inputs_of(gradient_graph, names, seed_input, grad_loads)
    grad_stores = {
        t: connect.to_store_handle(t, h) for t, h in store_buffers.items() if t in backward
    }

    def serialise(
        graph: GraphWithNamedArgs, loads: Any, stores: Any, seeds: Sequence[popxl.Tensor]
    ) -> BatchSerialResult:
        streams = {t: s for t, s in store_streams.items() if t in graph.graph}
        io = io_mode != "compute"
        return _SerialLoopBuilder(
            graph, steps, rows, loads, streams, stores, seeds, io, numbered
        ).result()

    fwd_seeds = () if seed_input is None else (seed_input,)
    return (
        serialise(forward_graph, connect.loads, connect.stores, fwd_seeds),
        serialise(GraphWithNamedArgs(backward, named), grad_loads, grad_stores, seeds),
    )


def _check_pair(
    forward: GraphWithNamedArgs, gradient: GraphWithNamedArgs, keys: Sequence[popxl.Tensor]
) -> None:
    """Raise ValueError unless the graphs are a pair and each key is a tensor of one of them."""
    one, other = forward.graph, gradient.graph
    if gradient.grad_graph_info.forward_graph is not one:
        raise ValueError(f"{other.id!r} is no gradient graph of {one.id!r}")
    for t in keys:
        if t not in one and t not in other:
            raise ValueError(f"{t!r} is of neither {one.id!r} nor {other.id!r}")


class _Connections:
    """Remote-buffer locations from which the gradient graph loads tensors of the forward graph."""

    def __init__(
        self,
        steps: int,
        rows: range,
        forward: GraphWithNamedArgs,
        load_handles: Mapping[popxl.Tensor, LoadHandle],
        store_buffers: Mapping[popxl.Tensor, StoreHandle | ReplicaGrouping],
    ) -> None:
        self._steps, self._rows = steps, rows
        graph = forward.graph
        self.loads = {t: _as_handle(h) for t, h in load_handles.items() if t in graph}
        self.stores = {
            t: self.to_store_handle(t, h) for t, h in store_buffers.items() if t in graph
        }

    def to_store_handle(
        self, t: popxl.Tensor, handle: StoreHandle | ReplicaGrouping
    ) -> RemoteHandle:
        """Convert the location at which `t` is to be stored to a `RemoteHandle`."""
        if isinstance(handle, ReplicaGrouping):
            return self._new_handle(t, handle)
        return _as_handle(handle)

    def _new_handle(
        self, t: popxl.Tensor, shard_group: ReplicaGrouping | None = None
    ) -> RemoteHandle:
        buffer = batch_serial_buffer(t, self._steps, len(self._rows), shard_group)
        return RemoteHandle(buffer, -self._rows.start, shard_group)

    def inputs_of(
        self,
        gradient: GraphWithNamedArgs,
        names: Mapping[popxl.Tensor, str],
        seed: popxl.Tensor | None,
        loads: dict[popxl.Tensor, Any],
    ) -> tuple[NamedTensors, list[popxl.Tensor]]:
        """Determine for each gradient graph input if it is loaded, an argument or a seed.

        Args:
            names: of those tensors of the forward graph that become arguments.
            seed: the forward graph's.
            loads: what the gradient graph loads; those that are to be loaded too are added.

        Returns:
            The gradient graph's named inputs, and those that get the step's seed.
        """
        inputs: dict[popxl.Tensor, popxl.Tensor] = {}
        expected = gradient.grad_graph_info.expected_inputs
        for t, connection in zip(gradient.graph.inputs, expected, strict=False):
            source = connection.fwd_tensor
            if t in loads:
                continue
            if not is_fwd(connection):
                raise ValueError(
                    f"load_handles must say where the gradient of {source.name!r} comes from: "
                    f"{t.id!r} is not among them"
                )
            if source in names:
                inputs[source] = t
            else:
                loads[t] = self.forward_handle(source)
        named = {name: inputs[source] for source, name in names.items() if source in inputs}
        named.update(gradient.args.to_dict())
        seeds = [inputs[seed]] if seed is not None and seed in inputs else []
        return NamedTensors.from_dict(named), seeds

    def forward_handle(self, t: popxl.Tensor) -> RemoteHandle | OfRow:
        """Return the remote-buffer handle from which the backward pass loads forward tensor `t`."""
        loaded = self.loads.get(t)
        if loaded is not None and not isinstance(loaded, HostToDeviceStream):
            return loaded
        if t not in self.stores:
            self.stores[t] = self._new_handle(t)
        assert not self.stores[t].adds, "what is there is not the tensor that was added"
        return self.stores[t]
