"""Variables in remote memory, sharded over the replicas that share them (RTS)."""

from __future__ import annotations

import numpy as np

import popxl
import popxl_addons as addons
from examples.mnist import Linear
from popxl import ops
from popxl_addons.remote import load_remote_graph, named_variable_buffers, store_remote_graph
from popxl_addons.rts import all_gather_replica_sharded_graph, reduce_replica_sharded_graph

REPLICAS = 4


# [rts]
def matrix_step(w: np.ndarray, xs: np.ndarray, lr: float) -> np.ndarray:
    """One step of gradient descent on the mean of sum((x @ w)**2) / 2 over replicas.

    Args:
        w: weight (features, outputs).
        xs: inputs (replicas, rows, features).

    Returns:
        The new weight.
    """
    replicas, rows, features = xs.shape
    ir = popxl.Ir(replication=replicas)
    with ir.main_graph, popxl.in_sequence():
        # Remote memory holds, for each replica, a quarter of the elements.
        buffer = popxl.replica_sharded_buffer(w.shape, popxl.float32, shard_over=replicas)
        remote_w = popxl.remote_replica_sharded_variable(w, buffer, 0, name="w")

        shard = ops.remote_load(buffer, 0)
        whole = ops.collectives.replicated_all_gather(shard)
        x_stream = popxl.h2d_stream((rows, features), popxl.float32, "x")
        x = ops.host_load(x_stream)
        grad = x.T @ (x @ whole)

        # Each replica receives the mean of its own quarter only, and updates that.
        grad_shard = ops.collectives.replicated_reduce_scatter(
            grad, op="mean", configure_output_for_replicated_tensor_sharding=True
        )
        ops.scaled_add_(shard, grad_shard, b=-lr)
        ops.remote_store(buffer, 0, shard)
    with popxl.Session(ir, "ipu_model") as session:
        session.run({x_stream: xs})
    return session.get_tensor_data(remote_w)


# [end]


def layers_step(xs: np.ndarray, layers: int, lr: float):
    """One step for a stack of layers, one layer at a time on the device.

    Args:
        xs: inputs (replicas, rows, features).

    Returns:
        The weights of the layers before and after the step, (layers, features, features), and
        the outputs (replicas, rows, features).
    """
    replicas, rows, features = xs.shape
    ir = popxl.Ir(replication=replicas)
    with ir.main_graph, popxl.in_sequence():
        x_stream = popxl.h2d_stream((rows, features), popxl.float32, "x")
        x = ops.host_load(x_stream)

        # One graph and one set of buffers for all layers: a layer is an entry of the buffers.
        facts, layer = Linear(features, bias=False).create_graph(x)
        grad = addons.autodiff(layer)
        buffers = named_variable_buffers(facts, entries=layers)
        variables = [facts.init_remote(buffers, i, prefix=f"layer{i}") for i in range(layers)]
        load, names = load_remote_graph(buffers, layers)
        store = store_remote_graph(buffers, layers)
        shards = addons.NamedTensors.pack(names, load.call(0))
        gather, _ = all_gather_replica_sharded_graph(shards)
        reduce, _ = reduce_replica_sharded_graph(layer.args, op="mean")

        def load_layer(i: int):
            shards = addons.NamedTensors.pack(names, load.call(i))
            return shards, addons.NamedTensors.pack(names, gather.bind(shards).call())

        calls, y = [], x
        for i in range(layers):
            _, weights = load_layer(i)
            calls.append(layer.bind(weights).call_with_info(y))
            y = calls[-1].outputs[0]
        dy = y  # the gradient of sum(y**2) / 2
        for i in reversed(range(layers)):
            shards, _ = load_layer(i)
            dy, dw = grad.call(dy, args=grad.grad_graph_info.inputs_dict(calls[i]))
            grads = reduce.bind(addons.NamedTensors.pack(names, [dw])).call()
            for var, g in zip(shards.tensors, grads, strict=True):
                ops.scaled_add_(var, g, b=-lr)
            store.bind(shards).call(i)
        y_stream = addons.host_store(y)

    tensors = [t for layer_variables in variables for t in layer_variables.tensors]
    session = popxl.Session(ir, "ipu_model")
    before = np.stack([session.get_tensor_data(t).copy() for t in tensors])
    with session:
        outputs = session.run({x_stream: xs})
    data = session.get_tensors_data(tensors)
    return before, np.stack([data[t] for t in tensors]), outputs[y_stream]


if __name__ == "__main__":
    rng = np.random.default_rng(0)
    before, after, _ = layers_step(rng.normal(size=(REPLICAS, 2, 6)).astype(np.float32), 3, 0.01)
    print("largest change of each layer", np.abs(after - before).max((1, 2)))
