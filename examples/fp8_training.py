"""Training with `LinearFP8`, outlined with `call_module` so that its own gradient is used."""

from __future__ import annotations

import numpy as np

import popxl
import popxl_addons as addons
from examples.runs import run_from_weights
from popxl import ops
from popxl_addons.layers import LayerNorm
from popxl_addons.layers.linear_fp8 import LinearFP8

FEATURES, HIDDEN, CLASSES, BATCH = 16, 32, 8, 8
LR = 0.1


class Block(addons.Module):
    """A feed-forward whose products are in float8, with the rest in float32."""

    def __init__(self, metric: str):
        super().__init__()
        self.norm = LayerNorm()
        self.up = LinearFP8(HIDDEN, scale_metric=metric)
        self.down = LinearFP8(FEATURES, scale_metric=metric)

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        (y,) = self.call_module(self.up)(self.norm(x))
        (y,) = self.call_module(self.down)(ops.relu(y))
        return x + y


class Net(addons.Module):
    def __init__(self, metric: str):
        super().__init__()
        self.blocks = addons.Module.from_list([Block(metric), Block(metric)])
        self.head = LinearFP8(CLASSES, scale_metric=metric, bias=False)

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        for block in self.blocks:
            # The blocks have no gradient of their own: the transform differentiates their graphs,
            # and finds those of the layers that they call.
            (x,) = self.call_module(block)(x)
        (x,) = self.call_module(self.head)(x)
        return x


class Program:
    def __init__(self, metric: str = "amax"):
        ir = self.ir = popxl.Ir()
        with ir.main_graph, popxl.in_sequence():
            self.inputs = addons.InputStreams(
                x=((BATCH, FEATURES), popxl.float32), label=((BATCH,), popxl.int32)
            )
            x, label = (ops.host_load(s) for s in self.inputs)
            facts, fwd = Net(metric).create_graph(x)
            self.variables = facts.init()
            grad = addons.autodiff(fwd, grads_required=fwd.args.values_flat())
            info = fwd.bind(self.variables).call_with_info(x)
            loss, dlogits = addons.cross_entropy_with_grad(info.outputs[0], label)
            grads = grad.call(dlogits, args=grad.grad_graph_info.inputs_dict(info))
            names = fwd.args.keys_flat()
            self.grads = {n: addons.host_store(g) for n, g in zip(names, grads, strict=True)}
            for name, g in zip(names, grads, strict=True):
                ops.scaled_add_(self.variables.get(name), g, b=-LR)
            self.loss = addons.host_store(loss)

    def train(self, weights: dict[str, np.ndarray], xs: np.ndarray, labels: np.ndarray):
        """Losses; gradients of the first step."""
        data = {self.variables.get(n): a for n, a in weights.items()}
        pairs = zip(xs, labels, strict=True)
        feeds = ({self.inputs.x: x, self.inputs.label: label} for x, label in pairs)
        outputs, _ = run_from_weights(self.ir, "ipu_model", data, feeds)
        first = {n: outputs[0][s] for n, s in self.grads.items()}
        return [float(out[self.loss]) for out in outputs], first
