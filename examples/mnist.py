"""Classify images of digits: layers, gradients and an optimizer as graphs of their own."""

from __future__ import annotations

from functools import partial

import numpy as np

import popxl
import popxl_addons as addons
from examples.digits import CLASSES, PIXELS, digits
from popxl import ops

LEARNING_RATE = 1e-2
BATCH = 32


class Linear(addons.Module):
    def __init__(self, out_features: int, bias: bool = True):
        super().__init__()
        self.out_features = out_features
        self.bias = bias

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        shape = (x.shape[-1], self.out_features)
        std = 1 / np.sqrt(shape[0])
        rng = np.random.default_rng(shape[1])
        w = self.add_variable_input("weight", partial(rng.normal, 0, std, shape), x.dtype)
        y = x @ w
        if self.bias:
            y = y + self.add_variable_input("bias", partial(np.zeros, y.shape[-1]), x.dtype)
        return y


class Net(addons.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = Linear(48)
        self.fc2 = Linear(32)
        self.head = Linear(CLASSES, bias=False)

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        x = ops.gelu(self.fc1(x))
        x = ops.gelu(self.fc2(x))
        return self.head(x)


class Adam(addons.Module):
    """AdamW: the update of one variable, in place."""

    # The state changes in place, so the order of the ops matters.
    @popxl.in_sequence()
    def build(
        self,
        var: popxl.TensorByRef,
        grad: popxl.Tensor,
        *,
        lr: float | popxl.Tensor,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-5,
        weight_decay: float = 0.01,
    ) -> None:
        zeros = partial(np.zeros, var.shape)
        m = self.add_variable_input("first_order", zeros, popxl.float32, by_ref=True)
        v = self.add_variable_input("second_order", zeros, popxl.float32, by_ref=True)
        t = self.add_variable_input("step", partial(np.zeros, ()), popxl.float32, by_ref=True)
        ops.var_updates.accumulate_moving_average_(m, grad, f=beta1)
        ops.var_updates.accumulate_moving_average_square_(v, grad, f=beta2)
        updater = ops.var_updates.adam_updater(
            m,
            v,
            weight=var,
            weight_decay=weight_decay,
            time_step=t,
            beta1=beta1,
            beta2=beta2,
            epsilon=eps,
        )
        step = -lr if isinstance(lr, float) else ops.negate(lr)
        ops.scaled_add_(var, updater, b=step)


def optimizer_step(variables, grads, optimizer: addons.Module, lr) -> None:
    """Update each variable with its gradient, each with optimizer state of its own."""
    for name, var in variables.named_tensors.items():
        facts, graph = optimizer.create_graph(var, var.spec, lr=lr, weight_decay=0.01)
        state = facts.init(prefix=f"optimizer.{name}")
        graph.bind(state).call(var, grads[name])


# [program]
def train_program():
    ir = popxl.Ir()
    ir.num_host_transfers = 1
    with ir.main_graph, popxl.in_sequence():
        img_spec = popxl.TensorSpec((BATCH, PIXELS), popxl.float32)
        img_stream = popxl.h2d_stream(*img_spec.to_tuple(), name="image")
        label_stream = popxl.h2d_stream((BATCH,), popxl.int32, name="label")
        loss_stream = popxl.d2h_stream((), popxl.float32, name="loss")
        img_t = ops.host_load(img_stream, "image")
        label_t = ops.host_load(label_stream, "label")

        # One graph of the network, and one of its gradient.
        facts, forward_graph = Net().create_graph(img_t)
        gradient_graph = addons.autodiff(forward_graph, grads_required=forward_graph.args.tensors)

        variables = facts.init()
        call_info = forward_graph.bind(variables).call_with_info(img_t)
        logits = call_info.outputs[0]
        loss, dlogits = addons.ops.cross_entropy_with_grad(logits, label_t)
        activations = gradient_graph.grad_graph_info.inputs_dict(call_info)
        grad_info = gradient_graph.call_with_info(dlogits, args=activations)

        grads = gradient_graph.grad_graph_info.fwd_graph_ins_to_grad_parent_outs(grad_info)
        named_grads = {n: grads[t] for n, t in forward_graph.args.named_tensors.items()}
        optimizer_step(variables, named_grads, Adam(cache=True), LEARNING_RATE)
        ops.host_store(loss_stream, loss)
    return ir, (img_stream, label_stream), loss_stream, variables


# [end]


def train(steps: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Losses of all steps and the trained weights by name."""
    ir, inputs, loss_stream, variables = train_program()
    images, labels = digits(steps * BATCH)
    losses = []
    with popxl.Session(ir, "ipu_model") as session:
        for i in range(steps):
            batch = slice(i * BATCH, (i + 1) * BATCH)
            outputs = session.run(dict(zip(inputs, [images[batch], labels[batch]], strict=True)))
            losses.append(outputs[loss_stream])
    # Leaving the session has brought the weights back to the host.
    weights = session.get_tensors_data(variables.tensors)
    return np.array(losses), {n: weights[t] for n, t in variables.named_tensors.items()}


def predict(weights: dict[str, np.ndarray], images: np.ndarray) -> np.ndarray:
    """Classes of `images`: the same module in a program without gradients."""
    ir = popxl.Ir()
    with ir.main_graph:
        img_stream = popxl.h2d_stream(images.shape, popxl.float32, name="image")
        x = ops.host_load(img_stream)
        facts, graph = Net().create_graph(x)
        variables = facts.init()
        (logits,) = graph.bind(variables).call(x)
        logits_stream = addons.host_store(logits)
    session = popxl.Session(ir, "ipu_model")
    session.write_variables_data(variables.to_mapping(addons.NamedTensors.from_dict(weights)))
    with session:
        return session.run({img_stream: images})[logits_stream].argmax(-1)


if __name__ == "__main__":
    losses, weights = train(200)
    images, labels = digits(500, seed=1)
    accuracy = (predict(weights, images) == labels).mean()
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, accuracy {accuracy:.1%}")
