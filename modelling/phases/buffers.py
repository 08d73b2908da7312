"""Remote buffers for activations and inputs: one row per layer, one entry per micro-batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import popxl
import popxl_addons as addons
from modelling.phases.settings import PhaseSettings
from popxl import ops
from popxl_addons.remote import create_remote_buffer
from popxl_addons.transforms.batch_serialisation import OfRow, RemoteHandle


def fixed_row_handle(
    buffer: popxl.RemoteBuffer, row: int, shard_group: popxl.ReplicaGrouping | None = None
) -> RemoteHandle:
    """Returns the handle of one buffer row, whichever layer of the phase uses it."""
    offset = (lambda _: popxl.constant(row, popxl.int32)) if row else None
    return RemoteHandle(buffer, offset, shard_group, grows=False)


def store_gradient(buffer: popxl.RemoteBuffer, row: popxl.Tensor, gradient: popxl.Tensor) -> None:
    """Stores a gradient or a sum of gradients, rounded by hash to the dtype of the buffer."""
    if gradient.dtype != buffer.tensor_dtype:
        gradient = addons.round_by_hash(gradient, buffer.tensor_dtype)
    ops.remote_store(buffer, row, gradient)


@dataclass(frozen=True)
class LayerIO:
    """A layer input or output: spec, and remote-buffer rows of its value and its gradient.

    Attributes:
        spec: spec of one micro-batch on one replica.
        value: handle that the value is loaded from (input) or stored to (output); for an input
            that is computed from the phase's row, the function that computes it.
        grad: handle that the gradient is stored to (input) or loaded from (output); None if the
            value has no gradient.
    """

    spec: popxl.TensorSpec
    value: RemoteHandle | OfRow
    grad: RemoteHandle | None = None

    def load_first_row(self, micro_batch: popxl.Tensor) -> popxl.Tensor:
        """Load layer row 0 of micro-batch `micro_batch` (int32 scalar): a tensor of `spec`."""
        return ops.remote_load(self.value_handle.buffer, micro_batch)

    @property
    def value_handle(self) -> RemoteHandle:
        """Remote-buffer handle of the value; an error if the handle depends on the layer's row."""
        assert isinstance(self.value, RemoteHandle)
        return self.value


class ActivationBuffers:
    """Remote buffers for activations between a stack's layers, and for their gradients.

    A layer reads one row and writes the next. Before the first trainable layer no backward pass
    reads a row again and there are no gradients, so layers overwrite the row that they read.

    Args:
        spec: spec of one micro-batch on one replica, (batch, sequence, hidden).
        requires_grad: True if the module that writes the first row has a backward pass.
    """

    def __init__(
        self, spec: popxl.TensorSpec, settings: PhaseSettings, requires_grad: bool
    ) -> None:
        self._spec, self._settings = spec, settings
        self._shards = settings.activation_shards
        self._x = create_activation_buffer(spec, settings)
        self._row, self._has_gradient = 0, requires_grad

    @cached_property
    def _gradient_buffer(self) -> popxl.RemoteBuffer:
        return create_gradient_buffer(self._spec, self._settings)

    @property
    def last_row(self) -> LayerIO:
        """The last reserved buffer row, as a layer input or output of a single-layer phase."""
        return self._layer_io_at_row(0)

    def reserve_rows(self, num_layers: int, requires_grad: bool) -> tuple[LayerIO, LayerIO]:
        """Reserve buffer rows for `num_layers` more layers; returns the layers' input and output.

        Args:
            num_layers: number of layers, all in one phase.
            requires_grad: True if any of them is trainable or reads another value with a gradient.
        """
        if not (requires_grad or self._has_gradient):
            return self.last_row, self.last_row
        # The layers of a phase share their graphs, and all but the first return a gradient.
        self._has_gradient = self._has_gradient or num_layers > 1
        layer_ios = self._layer_io_at_row(0), self._layer_io_at_row(1, requires_grad=True)
        self._row, self._has_gradient = self._row + num_layers, True
        return layer_ios

    def shared_output(self) -> LayerIO:
        """The last reserved row as a layer input that all layers of a phase share.

        Each layer adds to its gradient.
        """
        value = fixed_row_handle(self._x, self._row, self._shards)
        if not self._has_gradient:
            return LayerIO(self._spec, value)
        grad = fixed_row_handle(self._gradient_buffer, self._row, self._shards)
        return LayerIO(self._spec, value, replace(grad, adds=True))

    def zero_grad(self) -> None:
        """Zero the last reserved row's gradient, before several layers add to it."""
        if self._has_gradient:
            zero_row(self._gradient_buffer, self._row, self._settings)

    def zero_first_row(self) -> None:
        """Zero buffer row 0 of the activations for every micro-batch."""
        zero_row(self._x, 0, self._settings)

    def _layer_io_at_row(self, row_offset: int, requires_grad: bool = False) -> LayerIO:
        """Layer input or output at buffer row `row_offset`, counted from the last reserved row.

        Args:
            requires_grad: True if the row has a gradient even where the rows before have none.
        """
        if not (requires_grad or self._has_gradient):
            return LayerIO(self._spec, fixed_row_handle(self._x, self._row, self._shards))
        offset = self._row + row_offset
        x, dx = (
            RemoteHandle(buffer, offset, self._shards)
            for buffer in (self._x, self._gradient_buffer)
        )
        return LayerIO(self._spec, x, dx)


def zero_row(buffer: popxl.RemoteBuffer, row: int, settings: PhaseSettings) -> None:
    """Zero a remote-buffer row for every micro-batch of a pass over the layers."""
    steps = settings.micro_batches_per_pass

    def zero_entry(entry: popxl.Tensor) -> popxl.Tensor:
        zero = ops.init(buffer.tensor_shape, buffer.tensor_dtype, meta_shape=buffer.meta_shape)
        ops.remote_store(buffer, entry, zero)
        return entry + 1

    first = popxl.constant(row * steps, popxl.int32)
    ops.repeat(popxl.gir().create_graph(zero_entry, first), steps, first)


def create_activation_buffer(spec: popxl.TensorSpec, settings: PhaseSettings) -> popxl.RemoteBuffer:
    """Create a remote buffer of one row for activations of `spec`."""
    shards = settings.activation_shards
    count = 1 if shards is None else shards.group_size
    if math.prod(spec.shape) % count:
        count = 1
    buffer = create_remote_buffer(spec, settings.micro_batches_per_pass, shards, count)
    buffer.kind = "activations between layers"
    return buffer


def create_gradient_buffer(spec: popxl.TensorSpec, settings: PhaseSettings) -> popxl.RemoteBuffer:
    """Create a remote buffer of one row for gradients of activations of `spec`."""
    buffer = create_activation_buffer(spec, settings)
    buffer.kind = "gradients between layers"
    return buffer


class InputBuffers:
    """Remote buffers of an optimizer step's batch: loaded from the host once, read by all phases.

    Args:
        specs: specs of one micro-batch on one replica, by stream name.
    """

    def __init__(self, specs: Mapping[str, popxl.TensorSpec], settings: PhaseSettings) -> None:
        self.streams = {
            name: popxl.h2d_stream(spec.shape, spec.dtype, name) for name, spec in specs.items()
        }
        self.buffers = {
            name: popxl.remote_buffer(spec.shape, spec.dtype, settings.micro_batches_per_pass)
            for name, spec in specs.items()
        }
        for buffer in self.buffers.values():
            buffer.kind = "inputs"
        self._steps = settings.micro_batches_per_pass

    def __getitem__(self, name: str) -> RemoteHandle:
        """Handle from which a phase loads the input stream `name`."""
        return fixed_row_handle(self.buffers[name], 0)

    def layer_io(self, name: str) -> LayerIO:
        """Returns the buffered host stream `name` as an input of layers."""
        return LayerIO(self.streams[name].spec, self[name])

    def layer_ios(self, names: Iterable[str]) -> dict[str, LayerIO]:
        """Returns the named, buffered host streams as inputs of layers, by name."""
        return {name: self.layer_io(name) for name in names}

    def load_from_host(self) -> None:
        """Copy the micro-batches of one pass over the layers from host streams to the buffers."""

        def load_micro_batch(step: popxl.Tensor) -> popxl.Tensor:
            for name, stream in self.streams.items():
                ops.remote_store(self.buffers[name], step, ops.host_load(stream))
            return step + 1

        with popxl.plan.part("inputs"):
            start = popxl.constant(0, popxl.int32)
            graph = popxl.gir().create_graph(load_micro_batch, start)
            ops.repeat(graph, self._steps, start)


def loop_over_layers(
    rows: Sequence[int] | range,
    body: Callable[..., Sequence[popxl.Tensor]],
    carry: Sequence[popxl.Tensor] = (),
    invariants: Sequence[popxl.Tensor] = (),
    row_offset: popxl.Tensor | None = None,
) -> list[popxl.Tensor]:
    """Run `body` once per row index in `rows` (one for each layer), as one loop of the program.

    Args:
        rows: row of each iteration, an arithmetic sequence.
        body: `body(row, *carry, *invariants) -> new carry`, which adds ops to the loop's graph and
            uses no tensors but its arguments.
        carry: tensors that each iteration replaces.
        invariants: tensors that are equal in all iterations.
        row_offset: int32 scalar that is added to each row; None: 0.

    Returns:
        The carry after the last row.
    """
    if len(rows) == 0:
        return list(carry)
    stride = rows[1] - rows[0] if len(rows) > 1 else 1

    def loop_body(
        row: popxl.Tensor, carry: list[popxl.Tensor], invariants: list[popxl.Tensor]
    ) -> list[popxl.Tensor]:
        return [row + stride, *body(row, *carry, *invariants)]

    first = popxl.constant(rows[0], popxl.int32) if row_offset is None else row_offset + rows[0]
    graph = popxl.gir().create_graph(loop_body, first, list(carry), list(invariants))
    return list(ops.repeat(graph, len(rows), first, *carry, *invariants))[1:]
