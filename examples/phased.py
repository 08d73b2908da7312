"""Phased execution: layers run one after the other, each for all micro-batches of a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import popxl
import popxl_addons as addons
from examples.mnist import Linear
from popxl import ops
from popxl_addons.remote import load_remote_graph, named_variable_buffers, store_remote_graph
from popxl_addons.rts import all_gather_replica_sharded_graph, reduce_replica_sharded_graph
from popxl_addons.transforms.batch_serialisation import (
    RemoteHandle,
    batch_serial_buffer,
    batch_serialise,
    batch_serialise_fwd_and_grad,
)


@dataclass(frozen=True)
class Sizes:
    replicas: int = 2
    micro_batches: int = 3
    rows: int = 4
    hidden: int = 8
    layers: int = 3
    lr: float = 0.1


class Block(addons.Module):
    """A residual layer."""

    def __init__(self, hidden: int):
        super().__init__()
        self.linear = Linear(hidden)

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        return x + ops.gelu(self.linear(x))


class Head(addons.Module):
    """The loss mean((x - target)**2), together with its gradient."""

    def build(self, x: popxl.Tensor, target: popxl.Tensor):
        error = x - target
        return error * (2 / x.nelms), ops.mean(error * error)


class Blocks:
    """Graphs and buffers of the layers' phases, with loads and stores of weights."""

    def __init__(self, sizes: Sizes, spec: popxl.TensorSpec):
        facts, graph = Block(sizes.hidden).create_graph(spec)
        accum_facts, grad = addons.autodiff_with_accumulation(
            graph, graph.args.tensors, grads_required=graph.graph.inputs[:1]
        )
        # The backward phase runs the forward graph again, so only the layer's input is kept.
        grad = addons.recompute_graph(grad)
        x, dy = graph.graph.inputs[0], grad.graph.inputs[0]
        # Row i holds the input of layer i; the output goes to the next row.
        rows = sizes.layers + 1
        self.x_buffer = batch_serial_buffer(x, sizes.micro_batches, rows)
        self.dx_buffer = batch_serial_buffer(x, sizes.micro_batches, rows)
        forward, backward = batch_serialise_fwd_and_grad(
            graph,
            grad,
            graph.args,
            steps=sizes.micro_batches,
            rows=sizes.layers,
            load_handles={x: (self.x_buffer, 0), dy: (self.dx_buffer, 1)},
            store_streams={},
            store_buffers={
                graph.graph.outputs[0]: RemoteHandle(self.x_buffer, 1),
                grad.graph.outputs[0]: RemoteHandle(self.dx_buffer, 0),
            },
        )
        self.forward, self.backward, self.accum_facts = forward.graph, backward.graph, accum_facts

        buffers = named_variable_buffers(facts, entries=sizes.layers)
        self.variables = [
            facts.init_remote(buffers, i, prefix=f"layer{i}") for i in range(sizes.layers)
        ]
        self.load, self.names = load_remote_graph(buffers, sizes.layers)
        self.store = store_remote_graph(buffers, sizes.layers)
        shards = addons.NamedTensors.pack(self.names, self.load.call(0))
        self.gather, _ = all_gather_replica_sharded_graph(shards)
        groups = facts.replica_groupings
        self.reduce, self.reduce_names = reduce_replica_sharded_graph(
            graph.args, op="mean", shard_groups=groups
        )
        self.lr = sizes.lr

    def forward_layer(self, i: popxl.Tensor) -> popxl.Tensor:
        """Load the weights once, then run all micro-batches."""
        shards = addons.NamedTensors.pack(self.names, self.load.call(i))
        weights = addons.NamedTensors.pack(self.names, self.gather.bind(shards).call())
        self.forward.bind(weights).call(i)
        return i + 1

    @popxl.in_sequence()
    def backward_layer(self, i: popxl.Tensor) -> popxl.Tensor:
        """Accumulate gradients over all micro-batches, reduce them, update the shards."""
        shards = addons.NamedTensors.pack(self.names, self.load.call(i))
        weights = addons.NamedTensors.pack(self.names, self.gather.bind(shards).call())
        accumulators = self.accum_facts.init_zero()
        bound = self.backward.bind(weights)
        bound.bind(self.backward.args.to_mapping(accumulators)).call(i)
        grads = addons.NamedTensors.pack(
            self.reduce_names, self.reduce.bind(accumulators.accum).call()
        )
        for name, shard in shards.named_tensors.items():
            ops.scaled_add_(shard, grads.get(name), b=-self.lr)
        self.store.bind(shards).call(i)
        return i - 1


def train_step(xs: np.ndarray, targets: np.ndarray, sizes: Sizes):
    """One optimizer step.

    Args:
        xs, targets: (micro_batches, replicas, rows, hidden).

    Returns:
        Losses (micro_batches, replicas); the weights of each layer by name before and after.
    """
    ir = popxl.Ir(replication=sizes.replicas)
    ir.num_host_transfers = sizes.micro_batches
    spec = popxl.TensorSpec((sizes.rows, sizes.hidden), popxl.float32)
    with ir.main_graph, popxl.in_sequence():
        x_stream = popxl.h2d_stream(*spec.to_tuple(), name="x")
        target_stream = popxl.h2d_stream(*spec.to_tuple(), name="target")
        loss_stream = popxl.d2h_stream((), popxl.float32, name="loss")
        blocks = Blocks(sizes, spec)

        # Phase 1: inputs into row 0.
        copy = addons.GraphWithNamedArgs(ir.create_graph(lambda t: t + 0, spec))
        (t,), (out,) = copy.graph.inputs, copy.graph.outputs
        to_row_0 = {out: (blocks.x_buffer, 0)}
        fill = batch_serialise(copy, sizes.micro_batches, {t: x_stream}, {}, to_row_0)
        fill.graph.call(0)

        # Phase 2: all layers, forwards.
        ops.repeat(ir.create_graph(blocks.forward_layer, _INDEX), sizes.layers, _index(0))

        # Phase 3: loss and its gradient.
        _, head = Head().create_graph(spec, spec)
        x, target = head.graph.inputs
        dx, loss = head.graph.outputs
        serial_head = batch_serialise(
            head,
            sizes.micro_batches,
            load_handles={x: RemoteHandle(blocks.x_buffer, sizes.layers), target: target_stream},
            store_streams={loss: loss_stream},
            store_buffers={dx: RemoteHandle(blocks.dx_buffer, sizes.layers)},
        )
        serial_head.graph.call(0)

        # Phase 4: all layers, backwards, each with its optimizer step.
        last = _index(sizes.layers - 1)
        ops.repeat(ir.create_graph(blocks.backward_layer, _INDEX), sizes.layers, last)

    session = popxl.Session(ir, "ipu_model")
    before = _by_name(session, blocks.variables)
    with session:
        losses = session.run({x_stream: xs, target_stream: targets})[loss_stream]
    return losses, before, _by_name(session, blocks.variables)


_INDEX = popxl.TensorSpec((), popxl.int32)


def _index(i: int) -> popxl.Tensor:
    return popxl.constant(i, popxl.int32)


def _by_name(session: popxl.Session, variables) -> list[dict[str, np.ndarray]]:
    data = session.get_tensors_data([t for layer in variables for t in layer.tensors])
    return [{n: data[t].copy() for n, t in v.named_tensors.items()} for v in variables]


if __name__ == "__main__":
    s = Sizes()
    rng = np.random.default_rng(0)
    shape = (s.micro_batches, s.replicas, s.rows, s.hidden)
    data = [rng.normal(size=shape).astype(np.float32) for _ in range(2)]
    print("losses", train_step(*data, s)[0])
