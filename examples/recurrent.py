"""A language model of characters with a recurrent layer: a loop whose gradient is a loop."""

from __future__ import annotations

import numpy as np

import popxl
import popxl_addons as addons
from popxl import ops
from popxl_addons import NamedTensors
from popxl_addons.layers import Embedding, Linear

BATCH, LENGTH, VOCAB, HIDDEN = 2, 5, 16, 6


def sigmoid(x: popxl.Tensor) -> popxl.Tensor:
    return ops.tanh(x * 0.5) * 0.5 + 0.5


class Cell(addons.Module):
    """One step of a gated recurrent unit (Cho et al., 2014), as in torch."""

    def __init__(self):
        super().__init__()
        self.x, self.h = Linear(3 * HIDDEN), Linear(3 * HIDDEN)

    def build(self, h: popxl.Tensor, x: popxl.Tensor) -> popxl.Tensor:
        xr, xz, xn = ops.split(self.x(x), 3, axis=-1)
        hr, hz, hn = ops.split(self.h(h), 3, axis=-1)
        r, z = sigmoid(xr + hr), sigmoid(xz + hz)
        n = ops.tanh(xn + r * hn)
        return n + z * (h - n)


class Recurrent(addons.Module):
    """Recurrent layer: states after each step. The loop's body calls the cell's graph."""

    def __init__(self):
        super().__init__()
        self.cell = Cell()

    def build(self, xs: popxl.Tensor) -> popxl.Tensor:
        """xs: (length, batch, hidden) -> the same."""
        ir = popxl.gcg().ir
        h = ops.init((BATCH, HIDDEN), xs.dtype)
        states = ops.init(xs.shape, xs.dtype)
        facts, cell = self.cell.create_graph(h, h)
        variables = self.add_variable_inputs("cell", facts)

        def step(h, i, states, xs, weights: list[popxl.Tensor]):
            x = ops.dynamic_slice(xs, i, [0], [1], True).reshape((BATCH, HIDDEN))
            named = NamedTensors.pack(variables.keys_flat(), weights)
            (h,) = cell.bind(named).call(h, x)
            row = h.reshape((1, BATCH, HIDDEN))
            return h, i + 1, ops.dynamic_update(states, i, row, [0], [1], True)

        i, weights = popxl.constant(0, popxl.int32), variables.values_flat()
        body = ir.create_graph(step, h, i, states, xs, weights)
        return ops.repeat(body, LENGTH, h, i, states, xs, *weights)[2]


class Model(addons.Module):
    def __init__(self):
        super().__init__()
        self.embedding = Embedding(popxl.float32, VOCAB, HIDDEN)
        self.layers = addons.Module.from_list([Recurrent(), Recurrent()])
        self.head = Linear(VOCAB)

    def build(self, words: popxl.Tensor, labels: popxl.Tensor) -> popxl.Tensor:
        xs = self.embedding(words).transpose((1, 0, 2))
        for layer in self.layers:
            xs = layer(xs)
        logits = self.head(xs.transpose((1, 0, 2)))
        return addons.cross_entropy(logits, labels)


def loss_and_gradients(weights: dict[str, np.ndarray], words: np.ndarray, labels: np.ndarray):
    """The loss, and gradients by the names of the weights."""
    ir = popxl.Ir()
    with ir.main_graph:
        fed = [addons.host_load(a, popxl.int32, n) for n, a in (("x", words), ("y", labels))]
        inputs = [t for _, _, t in fed]
        facts, fwd = Model().create_graph(*inputs)
        variables = facts.init()
        grad = addons.autodiff(fwd, grads_required=fwd.args.values_flat())
        info = fwd.bind(variables).call_with_info(*inputs)
        grads = grad.call(popxl.constant(1.0), args=grad.grad_graph_info.inputs_dict(info))
        loss = addons.host_store(info.outputs[0])
        streams = [addons.host_store(g) for g in grads]
    by_name = variables.to_dict()
    assert by_name.keys() == weights.keys()
    with popxl.Session(ir, "ipu_model") as session:
        session.write_variables_data({by_name[n]: a for n, a in weights.items()})
        out = session.run({stream: data for data, stream, _ in fed})
    return out[loss], {n: out[s] for n, s in zip(fwd.args.keys_flat(), streams, strict=True)}
