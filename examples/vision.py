"""A residual network for images: convolutions, group and batch normalisation, pooling.

The stem is frozen: its batch normalisation uses the statistics of an earlier training. The blocks
behind it are trained, with momentum.
"""

from __future__ import annotations

import numpy as np

import popxl
import popxl_addons as addons
from examples.runs import run_from_weights
from popxl import ops
from popxl.utils import to_numpy
from popxl_addons import NamedTensors
from popxl_addons.layers import Conv2D, GroupNorm, Linear

CHANNELS, CLASSES, SIZE, BATCH = 4, 5, 12, 3
LR, MOMENTUM = 0.05, 0.9


class BatchNorm(addons.Module):
    """Batch normalization with fixed statistics."""

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        shape = (x.shape[1],)
        ones, zeros = lambda: np.ones(shape), lambda: np.zeros(shape)
        scale = self.add_variable_input("weight", ones, x.dtype)
        bias = self.add_variable_input("bias", zeros, x.dtype)
        mean = self.add_variable_input("mean", zeros, x.dtype)
        var = self.add_variable_input("var", ones, x.dtype)
        return ops.batch_norm_inference(x, scale, bias, mean, var, epsilon=1e-5)


class Stem(addons.Module):
    def __init__(self):
        super().__init__()
        self.conv = Conv2D(CHANNELS, 3, strides=(2, 2), paddings=(1, 1, 1, 1), bias=False)
        self.norm = BatchNorm()

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        x = ops.relu(self.norm(self.conv(x)))
        return ops.max_pool(x, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1, 1, 1))


class Block(addons.Module):
    def __init__(self, channels: int, stride: int, groups: int):
        super().__init__()
        pad = (1, 1, 1, 1)
        self.conv1 = Conv2D(channels, (3, 3), (stride, stride), pad, bias=False)
        self.norm1 = GroupNorm(2)
        self.conv2 = Conv2D(channels, (3, 3), paddings=pad, groups=groups)
        self.norm2 = GroupNorm(2)
        self.short = Conv2D(channels, 1, (stride, stride))

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        y = ops.relu(self.norm1(self.conv1(x)))
        return ops.relu(self.norm2(self.conv2(y)) + self.short(x))


class Net(addons.Module):
    def __init__(self):
        super().__init__()
        self.blocks = addons.Module.from_list(
            [Block(CHANNELS, 1, groups=2), Block(2 * CHANNELS, 2, groups=1)]
        )
        self.fc = Linear(CLASSES)

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        for block in self.blocks:
            x = block(x)
        x = ops.average_pool(x, kernel_size=x.shape[2:], stride=(1, 1))
        return self.fc(x.flatten().reshape((x.shape[0], x.shape[1])))


class Momentum(addons.Module):
    """v = m * v + g; w = w - lr * v."""

    @popxl.in_sequence()
    def build(self, var: popxl.TensorByRef, grad: popxl.Tensor) -> None:
        v = self.add_variable_input("v", lambda: np.zeros(var.shape), var.dtype, by_ref=True)
        ops.var_updates.accumulator_scale_(v, MOMENTUM)
        ops.add_(v, grad)
        ops.scaled_add_(var, v, b=-LR)


class Program:
    def __init__(self):
        ir = self.ir = popxl.Ir()
        with ir.main_graph, popxl.in_sequence():
            self.inputs = addons.InputStreams(
                image=((BATCH, 3, SIZE, SIZE), popxl.float32), label=((BATCH,), popxl.int32)
            )
            self.outputs = addons.OutputStreams(
                loss=((), popxl.float32), logits=((BATCH, CLASSES), popxl.float32)
            )
            image, label = (ops.host_load(s) for s in self.inputs)
            facts, stem = Stem().create_graph(image)
            self.stem = facts.init("stem")
            (x,) = stem.bind(self.stem).call(image)
            facts, net = Net().create_graph(x)
            self.net = facts.init("net")
            grad = addons.autodiff(net, grads_required=net.args.tensors)
            info = net.bind(self.net).call_with_info(x)
            logits = info.outputs[0]
            loss, dlogits = addons.cross_entropy_with_grad(logits, label)
            call = grad.call_with_info(dlogits, args=grad.grad_graph_info.inputs_dict(info))
            by_variable = grad.grad_graph_info.fwd_parent_ins_to_grad_parent_outs(info, call)
            self.update(by_variable)
            ops.host_store(self.outputs.loss, loss)
            ops.host_store(self.outputs.logits, logits)

    def update(self, grads) -> None:
        momentum, state = Momentum(cache=True), {}
        for name, var in self.net.to_dict().items():
            facts, graph = momentum.create_graph(var, grads[var].spec)
            state[name] = facts.init(f"momentum.{name}")
            graph.bind(state[name]).call(var, grads[var])
        self.state = NamedTensors.from_dict(state)

    def weights(self, model) -> addons.WeightsDict:
        """Returns the weights of a torch module with the same names."""
        out = Conv2D.torch_mapping(self.stem.conv, model.stem.conv)
        norm = model.stem.norm
        theirs = norm.weight, norm.bias, norm.running_mean, norm.running_var
        for name, value in zip(("weight", "bias", "mean", "var"), theirs, strict=True):
            out[self.stem.norm.get(name)] = to_numpy(value)
        for i, block in enumerate(model.blocks):
            ours = self.net.blocks[i]
            for name in ("conv1", "conv2", "short"):
                out.update(Conv2D.torch_mapping(ours.get(name), getattr(block, name)))
            for name in ("norm1", "norm2"):
                out.update(GroupNorm.torch_mapping(ours.get(name), getattr(block, name)))
        out.update(Linear.torch_mapping(self.net.fc, model.fc))
        return out

    def train(self, model, images: np.ndarray, labels: np.ndarray):
        """Train from the weights of `model`; returns losses, logits and weights."""
        pairs = zip(images, labels, strict=True)
        feeds = ({self.inputs.image: image, self.inputs.label: label} for image, label in pairs)
        outputs, trained = run_from_weights(self.ir, "ipu_model", self.weights(model), feeds)
        losses, logits = ([out[s] for out in outputs] for s in self.outputs)
        return losses, logits, trained
