"""A layer whose attention writes its own gradient, so that no probabilities are kept.

Forwards, only the output and the logarithm of each row's sum of exponentials are kept; backwards
the probabilities follow from these (Dao et al., 2022). The attention is outlined with
`call_module`: its graph's gradient graph is used wherever the layer's is differentiated.
"""

from __future__ import annotations

import numpy as np

import popxl
import popxl_addons as addons
from popxl import ops
from popxl_addons.layers import LayerNorm, Linear

BATCH, LENGTH, HEADS, SIZE = 2, 5, 2, 4
HIDDEN = HEADS * SIZE


class Attention(addons.Module):
    """Causal attention of heads. A learned bias of each head's scores is a variable."""

    def build(self, q: popxl.Tensor, k: popxl.Tensor, v: popxl.Tensor) -> popxl.Tensor:
        bias = self.add_variable_input("bias", lambda: np.zeros((HEADS, LENGTH, LENGTH)), q.dtype)
        scores = self.scores(q, k, bias)
        lse = ops.logsumexp(scores, axis=-1, keepdims=True)
        out = ops.exp(scores - lse) @ v
        for name, t in (("q", q), ("k", k), ("v", v), ("bias", bias), ("lse", lse), ("out", out)):
            self.aux[name] = t
        self.aux["scale"] = SIZE**-0.5
        return out

    def scores(self, q: popxl.Tensor, k: popxl.Tensor, bias: popxl.Tensor) -> popxl.Tensor:
        later = popxl.constant(np.triu(np.full((LENGTH, LENGTH), -1e4), 1), q.dtype)
        return q @ k.transpose((0, 1, 3, 2)) * SIZE**-0.5 + bias + later

    def build_grad(self, dout: popxl.Tensor):
        q, k, v = (self.aux[name] for name in "qkv")
        probs = ops.exp(self.scores(q, k, self.aux["bias"]) - self.aux["lse"])
        delta = ops.sum(dout * self.aux["out"], axis=-1, keepdims=True)
        dscores = probs * (dout @ v.transpose((0, 1, 3, 2)) - delta)
        self.var_grad["bias"] = ops.sum(dscores, axis=0)
        scaled = dscores * self.aux["scale"]
        dv = probs.transpose((0, 1, 3, 2)) @ dout
        return scaled @ k, scaled.transpose((0, 1, 3, 2)) @ q, dv


class Layer(addons.Module):
    def __init__(self):
        super().__init__()
        self.ln = LayerNorm()
        self.qkv, self.output = Linear(3 * HIDDEN), Linear(HIDDEN)
        self.attention = Attention()

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        def heads(t: popxl.Tensor) -> popxl.Tensor:
            return t.reshape((BATCH, LENGTH, HEADS, SIZE)).transpose((0, 2, 1, 3))

        q, k, v = map(heads, ops.split(self.qkv(self.ln(x)), 3, axis=-1))
        (z,) = self.call_module(self.attention)(q, k, v)
        return x + self.output(z.transpose((0, 2, 1, 3)).reshape(x.shape))


class Stack(addons.Module):
    """Two layers: one inlined, one as a graph of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Layer(), Layer()

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        (x,) = self.call_module(self.second)(self.first(x))
        return ops.mean(x * x)


def loss_and_gradients(weights: dict[str, np.ndarray], x: np.ndarray, micro_batches: int):
    """The mean loss and its gradients by the weights' names, accumulated over micro-batches."""
    ir = popxl.Ir()
    ir.num_host_transfers = micro_batches
    spec = popxl.TensorSpec((BATCH, LENGTH, HIDDEN), popxl.float32)
    with ir.main_graph, popxl.in_sequence():
        stream, out = popxl.h2d_stream(*spec.to_tuple()), popxl.d2h_stream((), popxl.float32)
        facts, fwd = Stack().create_graph(spec)
        grad_facts, grad = addons.autodiff_with_accumulation(fwd, fwd.args.tensors)
        variables, accumulators = facts.init(), grad_facts.init("accum")
        assert len(fwd.called_graphs_grad_info) == 2
        info = fwd.bind(variables).call_with_info(ops.host_load(stream))
        values = grad.grad_graph_info.inputs_dict(info)
        grad.bind(accumulators).call(popxl.constant(1.0), args=values)
        ops.host_store(out, info.outputs[0])
    # What was written for one micro-batch runs for all.
    addons.transforms.repeat_graph.repeat_graph(ir.main_graph, micro_batches)
    by_name = variables.to_dict()
    with popxl.Session(ir, "ipu_model") as session:
        session.write_variables_data({by_name[n]: a for n, a in weights.items()})
        losses = session.run({stream: x})[out]
    grads = {n: session.get_tensor_data(accumulators.accum.get(n)) for n in by_name}
    return losses, grads
