"""Activation and input buffers, whose rows hold all micro-batches of one step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import popxl
from modelling.phases.settings import Settings
from popxl import ops
from popxl_addons.remote import create_remote_buffer
from popxl_addons.transforms.batch_serialisation import RemoteHandle


def fixed_row(
    buffer: popxl.RemoteBuffer, row: int, shard_group: popxl.ReplicaGrouping | None = None
) -> RemoteHandle:
    """A row of a buffer that does not depend on the phase's row."""
    offset = (lambda _: popxl.constant(row, popxl.int32)) if row else None
    return RemoteHandle(buffer, offset, shard_group)


@dataclass(frozen=True)
class Port:
    """An input or output of a layer: its spec and rows of buffers.

    Attributes:
        spec: of one micro-batch on one replica.
        value: where the value is loaded from (input) or stored to (output).
        grad: where its gradient is stored to (input) or loaded from (output); None: it has none.
    """

    spec: popxl.TensorSpec
    value: RemoteHandle
    grad: RemoteHandle | None = None

    def at(self, step: popxl.Tensor) -> popxl.Tensor:
        """Load the value of micro-batch `step`, int32 scalar; of its first row, not sharded."""
        return ops.remote_load(self.value.buffer, step)


@dataclass(frozen=True)
class ActivationBuffers:
    """The values between the phases of a stack, and their gradients.

    Row r of `x` is the input of layer r, row r of `dx` its gradient (None without training); each
    row holds one entry for each micro-batch, of `spec`. Entries are cut over `shards`.
    """

    spec: popxl.TensorSpec
    x: popxl.RemoteBuffer
    dx: popxl.RemoteBuffer | None
    shards: popxl.ReplicaGrouping | None

    @classmethod
    def create(cls, spec: popxl.TensorSpec, rows: int, settings: Settings) -> ActivationBuffers:
        """Buffers of `rows` rows for activations of `spec`, [batch, sequence, hidden]."""
        shards = settings.activation_shards
        x = activation_buffer(spec, rows, settings)
        dx = gradient_buffer(spec, rows, settings) if settings.training else None
        return cls(spec, x, dx, shards)

    def value(self, offset: int = 0) -> RemoteHandle:
        """Row `offset` beyond the phase's own row."""
        return RemoteHandle(self.x, offset, self.shards)

    def grad(self, offset: int = 0) -> RemoteHandle | None:
        """Gradient of `value(offset)`; None without training."""
        return None if self.dx is None else RemoteHandle(self.dx, offset, self.shards)

    def port(self, offset: int = 0) -> Port:
        """`value(offset)` and its gradient, as a phase takes them."""
        return Port(self.spec, self.value(offset), self.grad(offset))

    def shared(self, row: int) -> Port:
        """Row `row`, whichever row the phase is at: each layer adds to its gradient."""
        value = fixed_row(self.x, row, self.shards)
        if self.dx is None:
            return Port(self.spec, value)
        return Port(self.spec, value, replace(fixed_row(self.dx, row, self.shards), adds=True))

    def begin_gradient(self, row: int, steps: int) -> None:
        """Let the gradient of row `row` be zero for all micro-batches, before layers add to it."""
        buffer = self.dx
        assert buffer is not None, "there are gradients in training only"

        def one_step(at: popxl.Tensor) -> popxl.Tensor:
            zero = ops.init(buffer.tensor_shape, buffer.tensor_dtype, meta_shape=buffer.meta_shape)
            ops.remote_store(buffer, at, zero)
            return at + 1

        first = popxl.constant(row * steps, popxl.int32)
        ops.repeat(popxl.gir().create_graph(one_step, first), steps, first)


def activation_buffer(spec: popxl.TensorSpec, rows: int, settings: Settings) -> popxl.RemoteBuffer:
    """A buffer of `rows` rows for activations of `spec`."""
    shards = settings.activation_shards
    count = 1 if shards is None else shards.group_size
    if math.prod(spec.shape) % count:
        count = 1
    buffer = create_remote_buffer(spec, rows * settings.micro_batches, shards, count)
    buffer.kind = "activations between layers"
    return buffer


def gradient_buffer(spec: popxl.TensorSpec, rows: int, settings: Settings) -> popxl.RemoteBuffer:
    """A buffer of `rows` rows for gradients of activations of `spec`."""
    buffer = activation_buffer(spec, rows, settings)
    buffer.kind = "gradients between layers"
    return buffer


class InputBuffers:
    """The batch on the device side of the host link: loaded once, read by any phase.

    Args:
        specs: of one micro-batch on one replica, by name.
    """

    def __init__(self, specs: Mapping[str, popxl.TensorSpec], settings: Settings) -> None:
        self.streams = {
            name: popxl.h2d_stream(spec.shape, spec.dtype, name) for name, spec in specs.items()
        }
        self.buffers = {
            name: popxl.remote_buffer(spec.shape, spec.dtype, settings.micro_batches)
            for name, spec in specs.items()
        }
        for buffer in self.buffers.values():
            buffer.kind = "inputs"
        self._steps = settings.micro_batches

    def __getitem__(self, name: str) -> RemoteHandle:
        """Where a phase loads the input `name` from."""
        return fixed_row(self.buffers[name], 0)

    def port(self, name: str) -> Port:
        """The input `name` as a phase takes it."""
        return Port(self.streams[name].spec, self[name])

    def ports(self, names: Iterable[str]) -> dict[str, Port]:
        """The inputs of these names, by name."""
        return {name: self.port(name) for name in names}

    def load(self) -> None:
        """Bring all micro-batches of the step from the host."""

        def load_one(step: popxl.Tensor) -> popxl.Tensor:
            for name, stream in self.streams.items():
                ops.remote_store(self.buffers[name], step, ops.host_load(stream))
            return step + 1

        with popxl.plan.part("inputs"):
            start = popxl.constant(0, popxl.int32)
            graph = popxl.gir().create_graph(load_one, start)
            ops.repeat(graph, self._steps, start)


def over_layers(
    rows: Sequence[int] | range,
    body: Callable[..., Sequence[popxl.Tensor]],
    carried: Sequence[popxl.Tensor] = (),
    invariant: Sequence[popxl.Tensor] = (),
) -> list[popxl.Tensor]:
    """Run a phase for each of `rows` in one loop of the program.

    Args:
        rows: an arithmetic sequence.
        body: `body(row, *carried, *invariant) -> new carried`, adding ops to the loop's graph.
            It must use no tensors but its arguments.

    Returns:
        The carried tensors after the last row.
    """
    if len(rows) == 0:
        return list(carried)
    stride = rows[1] - rows[0] if len(rows) > 1 else 1

    def one_row(
        row: popxl.Tensor, carried: list[popxl.Tensor], invariant: list[popxl.Tensor]
    ) -> list[popxl.Tensor]:
        return [row + stride, *body(row, *carried, *invariant)]

    first = popxl.constant(rows[0], popxl.int32)
    graph = popxl.gir().create_graph(one_row, first, list(carried), list(invariant))
    return list(ops.repeat(graph, len(rows), first, *carried, *invariant))[1:]
