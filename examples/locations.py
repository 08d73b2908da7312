"""One network, trained with its variables on the device, remote, sharded and in files.

The weights are always on the device, or in remote buffers, and there full or sharded over the
replicas. What is learned is the same.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

import popxl
import popxl_addons as addons
from examples.digits import CLASSES, PIXELS
from examples.mnist import Linear
from examples.runs import run_from_weights
from popxl import ops
from popxl_addons import NamedTensors
from popxl_addons.remote import (
    load_remote,
    load_remote_graph,
    named_variable_buffers,
    store_remote,
    store_remote_graph,
)
from popxl_addons.rts import (
    all_gather_replica_sharded_graph,
    gather_replica_sharded_tensor,
    reduce_replica_sharded_graph,
    reduce_replica_sharded_tensor,
)

Place = Literal["device", "remote", "remote_sharded", "sharded_inputs", "memory_map"]

REPLICAS, BATCH, LR = 2, 8, 0.2


class Net(addons.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = Linear(16)
        self.fc2 = Linear(CLASSES)

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        return self.fc2(ops.tanh(self.fc1(x)))


class ShardedNet(addons.Module):
    """Network that gathers its sharded variables."""

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        for name, features in (("fc1", 16), ("fc2", CLASSES)):
            shape = (x.shape[-1], features)
            rng = np.random.default_rng(features)
            w = self.add_replica_sharded_variable_input(
                f"{name}.weight",
                lambda rng=rng, shape=shape: rng.normal(0, shape[0] ** -0.5, shape),
                x.dtype,
            )
            b = self.add_variable_input(f"{name}.bias", lambda n=features: np.zeros(n), x.dtype)
            x = x @ gather_replica_sharded_tensor(w) + b
            x = ops.tanh(x) if name == "fc1" else x
        return x


class Training:
    """One step of data-parallel gradient descent, with the loss of each replica."""

    def __init__(self, place: Place, memmap_dir: str | None = None):
        self.memmap_dir = memmap_dir if place == "memory_map" else None
        ir = self.ir = popxl.Ir(replication=REPLICAS)
        with ir.main_graph, popxl.in_sequence():
            self.inputs = addons.InputStreams(
                x=((BATCH, PIXELS), popxl.float32), y=((BATCH,), popxl.int32)
            )
            x, y = (ops.host_load(s) for s in self.inputs)
            net = ShardedNet() if place == "sharded_inputs" else Net()
            self.facts, self.fwd = net.create_graph(x)
            self.outputs = addons.OutputStreams(loss=((), popxl.float32))
            getattr(self, place)(x, y)

    def gradients(self, variables: NamedTensors, x: popxl.Tensor, y: popxl.Tensor) -> NamedTensors:
        grad = addons.autodiff(self.fwd, grads_required=self.fwd.args.values_flat())
        info = self.fwd.bind(variables).call_with_info(x)
        loss, dlogits = addons.cross_entropy_with_grad(info.outputs[0], y)
        ops.host_store(self.outputs.loss, loss)
        grads = grad.call(dlogits, args=grad.grad_graph_info.inputs_dict(info))
        return NamedTensors.pack(self.fwd.args.keys_flat(), grads)

    def descend(self, variables: NamedTensors, grads: NamedTensors) -> None:
        for name, var in variables.to_dict().items():
            ops.scaled_add_(var, grads.get(name), b=-LR)

    # ---- places ---------------------------------------------------------------------------------
    def device(self, x: popxl.Tensor, y: popxl.Tensor) -> None:
        self.variables = self.facts.init()
        grads = self.gradients(self.variables, x, y)
        for g in grads.values_flat():
            ops.collectives.replicated_all_reduce_(g, op="mean")
        self.descend(self.variables, grads)

    def remote(self, x: popxl.Tensor, y: popxl.Tensor) -> None:
        buffers = named_variable_buffers(self.facts, shard_over_dict=False)
        self.variables = self.facts.init_remote(buffers, 0)
        loaded = load_remote(buffers)
        grads = self.gradients(loaded, x, y)
        reduced = grads.map(lambda g: ops.collectives.replicated_all_reduce(g, op="mean"))
        self.descend(loaded, reduced)
        store_remote(buffers, loaded)

    def remote_sharded(self, x: popxl.Tensor, y: popxl.Tensor) -> None:
        buffers = named_variable_buffers(self.facts)
        self.variables = self.facts.init_remote(buffers, 0, memmap_dir=self.memmap_dir)
        load, names = load_remote_graph(buffers)
        shards = NamedTensors.pack(names, load.call(0))
        gather, names = all_gather_replica_sharded_graph(shards)
        whole = NamedTensors.pack(names, gather.bind(shards).call())
        grads = self.gradients(whole, x, y)
        reduce, names = reduce_replica_sharded_graph(grads, "mean")
        self.descend(shards, NamedTensors.pack(names, reduce.bind(grads).call()))
        store_remote_graph(buffers).bind(shards).call(0)

    def memory_map(self, x: popxl.Tensor, y: popxl.Tensor) -> None:
        """Run like `remote_sharded`, with the host's copy in files."""
        self.remote_sharded(x, y)

    def sharded_inputs(self, x: popxl.Tensor, y: popxl.Tensor) -> None:
        """Run a network that gathers its own weights.

        The gradient of a gather is each replica's slice, not a sum over replicas. So gradients are
        those of the whole weights, reduced to shards.
        """
        buffers = named_variable_buffers(self.facts, shard_over_dict=False)
        self.variables = self.facts.init_remote(buffers, 0)
        loaded = load_remote(buffers)
        (logits,) = self.fwd.bind(loaded).call(x)
        ops.host_store(self.outputs.loss, addons.cross_entropy(logits, y))
        _, plain = Net().create_graph(x)
        grad = addons.autodiff(plain, grads_required=plain.args.values_flat())
        info = plain.bind(loaded.map(gather_replica_sharded_tensor)).call_with_info(x)
        _, dlogits = addons.cross_entropy_with_grad(info.outputs[0], y)
        grads = grad.call(dlogits, args=grad.grad_graph_info.inputs_dict(info))
        alone = self.ir.replica_grouping(group_size=1)
        by_name = dict(zip(plain.args.keys_flat(), grads, strict=True))
        for name, var in loaded.to_dict().items():
            cut = None if var.meta_shape else alone  # biases are whole
            mean = reduce_replica_sharded_tensor(by_name[name], "mean", shard_group=cut)
            ops.scaled_add_(var, mean, b=-LR)
        store_remote(buffers, loaded)

    # ---- running --------------------------------------------------------------------------------
    def train(self, weights: dict[str, np.ndarray], xs: np.ndarray, ys: np.ndarray):
        """xs: (steps, replicas, batch, pixels). Losses (steps, replicas), and weights by name."""
        data = {self.variables.get(n): a for n, a in weights.items()}
        feeds = ({self.inputs.x: x, self.inputs.y: y} for x, y in zip(xs, ys, strict=True))
        outputs, trained = run_from_weights(self.ir, "ipu_model", data, feeds)
        losses = np.stack([out[self.outputs.loss] for out in outputs])
        return losses, {n: trained[self.variables.get(n)] for n in weights}
