"""Activation and input buffers, whose rows hold the micro-batches of one pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import popxl
from modelling.phases.settings import PhaseSettings
from popxl import ops
from popxl_addons.remote import create_remote_buffer
from popxl_addons.transforms.batch_serialisation import OfRow, RemoteHandle


def fixed_row(
    buffer: popxl.RemoteBuffer, row: int, shard_group: popxl.ReplicaGrouping | None = None
) -> RemoteHandle:
    """A row of a buffer, which has it, that does not depend on the phase's row."""
    offset = (lambda _: popxl.constant(row, popxl.int32)) if row else None
    return RemoteHandle(buffer, offset, shard_group, grows=False)


@dataclass(frozen=True)
class LayerIO:
    """An input or output of a layer: its spec and rows of buffers.

    Attributes:
        spec: of one micro-batch on one replica.
        value: where the value is loaded from (input) or stored to (output); of an input that
            depends on the phase's row alone, what makes it.
        grad: where its gradient is stored to (input) or loaded from (output); None: it has none.
    """

    spec: popxl.TensorSpec
    value: RemoteHandle | OfRow
    grad: RemoteHandle | None = None

    def load(self, step: popxl.Tensor) -> popxl.Tensor:
        """Load the value of micro-batch `step`, int32 scalar; of its first row, not sharded."""
        return ops.remote_load(self.handle.buffer, step)

    @property
    def handle(self) -> RemoteHandle:
        """Where the value is, which depends on more than the row."""
        assert isinstance(self.value, RemoteHandle)
        return self.value


class ActivationRows:
    """The values that the layers of a stack hand on, and their gradients.

    Each layer reads a row, with an entry for each micro-batch, and writes the next one. As long as
    nothing up to a layer is trained, there is no backward pass to read its row again, nor a
    gradient: it writes the row that it reads.

    Args:
        spec: of one micro-batch on one replica, [batch, sequence, hidden].
        trained: whether what gives the first row has a backward pass.
    """

    def __init__(self, spec: popxl.TensorSpec, settings: PhaseSettings, trained: bool) -> None:
        self._spec, self._settings = spec, settings
        self._shards = settings.activation_shards
        self._x = activation_buffer(spec, 1, settings)
        self._row, self._has_gradient = 0, trained

    @cached_property
    def _dx(self) -> popxl.RemoteBuffer:
        return gradient_buffer(self._spec, 1, self._settings)

    @property
    def last_row(self) -> LayerIO:
        """The row that was written last, as a phase of one layer takes it."""
        return self._port(0)

    def reserve(self, layers: int, trained: bool) -> tuple[LayerIO, LayerIO]:
        """Where the next layers read, and where they write.

        Args:
            layers: how many there are, in one phase.
            trained: whether any of them has something that is trained, or reads something else that
                has a gradient.
        """
        if not (trained or self._has_gradient):
            return self.last_row, self.last_row
        # Layers of a phase are alike: those after the first have a gradient to give back.
        self._has_gradient = self._has_gradient or layers > 1
        layer_ios = self._port(0), self._port(1, gradient=True)
        self._row, self._has_gradient = self._row + layers, True
        return layer_ios

    def shared_output(self) -> LayerIO:
        """The row that was written last, whichever row a phase is at: each layer adds to its
        gradient."""
        value = fixed_row(self._x, self._row, self._shards)
        if not self._has_gradient:
            return LayerIO(self._spec, value)
        grad = fixed_row(self._dx, self._row, self._shards)
        return LayerIO(self._spec, value, replace(grad, adds=True))

    def zero_grad(self) -> None:
        """Let the gradient of the row that was written last be zero for all micro-batches, before
        layers add to it."""
        if self._has_gradient:
            zero_row(self._dx, self._row, self._settings)

    def zero_first_row(self) -> None:
        """Let the first row be zero for all micro-batches."""
        zero_row(self._x, 0, self._settings)

    def _port(self, row_offset: int, gradient: bool = False) -> LayerIO:
        """The row so many beyond the last one, for a phase's row 0.

        Args:
            gradient: it has one, whatever the rows before.
        """
        if not (gradient or self._has_gradient):
            return LayerIO(self._spec, fixed_row(self._x, self._row, self._shards))
        offset = self._row + row_offset
        x, dx = (RemoteHandle(buffer, offset, self._shards) for buffer in (self._x, self._dx))
        return LayerIO(self._spec, x, dx)


def zero_row(buffer: popxl.RemoteBuffer, row: int, settings: PhaseSettings) -> None:
    """Let a row of a buffer be zero for all micro-batches."""
    steps = settings.micro_batches_per_pass

    def one_step(at: popxl.Tensor) -> popxl.Tensor:
        zero = ops.init(buffer.tensor_shape, buffer.tensor_dtype, meta_shape=buffer.meta_shape)
        ops.remote_store(buffer, at, zero)
        return at + 1

    first = popxl.constant(row * steps, popxl.int32)
    ops.repeat(popxl.gir().create_graph(one_step, first), steps, first)


def activation_buffer(
    spec: popxl.TensorSpec, rows: int, settings: PhaseSettings
) -> popxl.RemoteBuffer:
    """A buffer of `rows` rows for activations of `spec`."""
    shards = settings.activation_shards
    count = 1 if shards is None else shards.group_size
    if math.prod(spec.shape) % count:
        count = 1
    buffer = create_remote_buffer(spec, rows * settings.micro_batches_per_pass, shards, count)
    buffer.kind = "activations between layers"
    return buffer


def gradient_buffer(
    spec: popxl.TensorSpec, rows: int, settings: PhaseSettings
) -> popxl.RemoteBuffer:
    """A buffer of `rows` rows for gradients of activations of `spec`."""
    buffer = activation_buffer(spec, rows, settings)
    buffer.kind = "gradients between layers"
    return buffer


class InputBuffers:
    """The batch on the device side of the host link: loaded once, read by any phase.

    Args:
        specs: of one micro-batch on one replica, by name.
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
        """Where a phase loads the input `name` from."""
        return fixed_row(self.buffers[name], 0)

    def layer_io(self, name: str) -> LayerIO:
        """The input `name` as a phase takes it."""
        return LayerIO(self.streams[name].spec, self[name])

    def layer_ios(self, names: Iterable[str]) -> dict[str, LayerIO]:
        """The inputs of these names, by name."""
        return {name: self.layer_io(name) for name in names}

    def load(self) -> None:
        """Load the micro-batches of a pass from the host."""

        def load_one(step: popxl.Tensor) -> popxl.Tensor:
            for name, stream in self.streams.items():
                ops.remote_store(self.buffers[name], step, ops.host_load(stream))
            return step + 1

        with popxl.plan.part("inputs"):
            start = popxl.constant(0, popxl.int32)
            graph = popxl.gir().create_graph(load_one, start)
            ops.repeat(graph, self._steps, start)


def loop_over_layers(
    rows: Sequence[int] | range,
    body: Callable[..., Sequence[popxl.Tensor]],
    carry: Sequence[popxl.Tensor] = (),
    invariants: Sequence[popxl.Tensor] = (),
    row_offset: popxl.Tensor | None = None,
) -> list[popxl.Tensor]:
    """Run a phase for each of `rows` in one loop of the program.

    Args:
        rows: an arithmetic sequence.
        body: `body(row, *carried, *invariant) -> new carried`, adding ops to the loop's graph.
            It must use no tensors but its arguments.
        ahead: int32 scalar that is added to the rows; None: 0.

    Returns:
        The carried tensors after the last row.
    """
    if len(rows) == 0:
        return list(carry)
    stride = rows[1] - rows[0] if len(rows) > 1 else 1

    def one_row(
        row: popxl.Tensor, carry: list[popxl.Tensor], invariants: list[popxl.Tensor]
    ) -> list[popxl.Tensor]:
        return [row + stride, *body(row, *carry, *invariants)]

    first = popxl.constant(rows[0], popxl.int32) if row_offset is None else row_offset + rows[0]
    graph = popxl.gir().create_graph(one_row, first, list(carry), list(invariants))
    return list(ops.repeat(graph, len(rows), first, *carry, *invariants))[1:]
