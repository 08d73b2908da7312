"""Data parallelism: every replica runs the same program on its own part of the batch."""

from __future__ import annotations

import numpy as np

import popxl
import popxl_addons as addons
from examples.digits import PIXELS, digits
from examples.mnist import BATCH, LEARNING_RATE, Adam, Net, optimizer_step
from popxl import ops

REPLICAS = 4


def train_program(replicas: int):
    ir = popxl.Ir(replication=replicas)
    micro_batch = BATCH // replicas
    with ir.main_graph, popxl.in_sequence():
        img_stream = popxl.h2d_stream((micro_batch, PIXELS), popxl.float32, name="image")
        label_stream = popxl.h2d_stream((micro_batch,), popxl.int32, name="label")
        loss_stream = popxl.d2h_stream((), popxl.float32, name="loss")
        img_t = ops.host_load(img_stream, "image")
        label_t = ops.host_load(label_stream, "label")

        facts, forward_graph = Net().create_graph(img_t)
        gradient_graph = addons.autodiff(forward_graph, grads_required=forward_graph.args.tensors)
        variables = facts.init()
        call_info = forward_graph.bind(variables).call_with_info(img_t)
        loss, dlogits = addons.ops.cross_entropy_with_grad(call_info.outputs[0], label_t)
        grad_info = gradient_graph.call_with_info(
            dlogits, args=gradient_graph.grad_graph_info.inputs_dict(call_info)
        )

        # The only difference to one replica: gradients become the mean over all replicas.
        grads = gradient_graph.grad_graph_info.fwd_graph_ins_to_grad_parent_outs(grad_info)
        named_grads = {n: grads[t] for n, t in forward_graph.args.named_tensors.items()}
        for g in named_grads.values():
            ops.collectives.replicated_all_reduce_(g, op="mean")
        optimizer_step(variables, named_grads, Adam(cache=True), LEARNING_RATE)
        ops.host_store(loss_stream, loss)
    return ir, (img_stream, label_stream), loss_stream, variables


def train(replicas: int, steps: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Mean losses of all steps, and the trained weights by name."""
    ir, inputs, loss_stream, variables = train_program(replicas)
    images, labels = digits(steps * BATCH)
    losses = []
    with popxl.Session(ir, "ipu_model") as session:
        for i in range(steps):
            batch = slice(i * BATCH, (i + 1) * BATCH)
            # (batch, ...) -> (replicas, micro_batch, ...); without the first axis for one replica.
            host = [
                data[batch].reshape(session._full_input_shape(stream.shape))
                for data, stream in zip((images, labels), inputs, strict=True)
            ]
            outputs = session.run(dict(zip(inputs, host, strict=True)))
            losses.append(outputs[loss_stream].mean())
    data = session.get_tensors_data(variables.tensors)
    return np.array(losses), {n: data[t] for n, t in variables.named_tensors.items()}


def train_ensemble(xs: np.ndarray, ys: np.ndarray, lr: float) -> np.ndarray:
    """Two linear models, each trained by two of four replicas.

    Args:
        xs, ys: data (steps, 4, rows, features) and (steps, 4, rows).

    Returns:
        Weights of the two models, (2, features).
    """
    steps, replicas, rows, features = xs.shape
    ir = popxl.Ir(replication=replicas)
    ir.num_host_transfers = steps
    # Replicas 0 and 2 hold one model, 1 and 3 the other.
    model_group = ir.replica_grouping(stride=2, group_size=2)
    with ir.main_graph, popxl.in_sequence():
        x_stream = popxl.h2d_stream((rows, features), popxl.float32, "x")
        y_stream = popxl.h2d_stream((rows,), popxl.float32, "y")
        # Each group starts from values of its own.
        start = np.zeros((model_group.num_groups, features), np.float32)
        w = popxl.variable(start, name="w", replica_grouping=model_group)

        def step(w: popxl.TensorByRef):
            x, y = ops.host_load(x_stream), ops.host_load(y_stream)
            error = ops.squeeze(x @ w.reshape((features, 1))) - y
            grad = ops.squeeze(error.reshape((1, rows)) @ x) * (1 / rows)
            grad = ops.collectives.replicated_all_reduce(grad, op="mean", group=model_group)
            ops.scaled_add_(w, grad, b=-lr)

        ops.repeat(ir.create_graph(step, w), steps, w)
    with popxl.Session(ir, "ipu_model") as session:
        session.run({x_stream: xs, y_stream: ys})
    return session.get_tensor_data(w)


if __name__ == "__main__":
    for replicas in (1, REPLICAS):
        losses, _ = train(replicas, 20)
        print(f"{replicas} replica(s): loss {losses[0]:.4f} -> {losses[-1]:.4f}")
