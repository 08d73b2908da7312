"""A frozen language model with adapters and an image prefix, of which only these are trained.

The layers' graph is made once. Gradients are required of its input and of the adapters; the rest of
the model is frozen and has none.
"""

from __future__ import annotations

import numpy as np

import popxl
import popxl_addons as addons
from examples.runs import run_from_weights
from popxl import ops
from popxl.utils import to_numpy
from popxl_addons import NamedTensors
from popxl_addons.layers import Embedding, LayerNorm, Linear
from popxl_addons.optimizers import AdamOptimizerStep

BATCH, IMAGE, WORDS, VOCAB, HIDDEN, LAYERS, BOTTLENECK = 2, 3, 4, 32, 12, 2, 4
LENGTH = IMAGE + WORDS
LR, EPS = 0.01, 1e-6


class Adapter(addons.Module):
    def __init__(self):
        super().__init__()
        self.down, self.up = Linear(BOTTLENECK), Linear(HIDDEN)

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        return x + self.up(ops.relu(self.down(x)))


class Layer(addons.Module):
    """Single-headed causal attention and a feed-forward, side by side as in GPT-J."""

    def __init__(self):
        super().__init__()
        self.ln = LayerNorm()
        self.qkv = Linear(3 * HIDDEN, bias=False)
        self.output = Linear(HIDDEN, bias=False)
        self.mlp = addons.Module.from_list([Linear(4 * HIDDEN), Linear(HIDDEN)])
        self.adapter = Adapter()

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        y = self.ln(x)
        q, k, v = ops.split(self.qkv(y), 3, axis=-1)
        mask = popxl.constant(np.triu(np.full((LENGTH, LENGTH), -1e4), 1), x.dtype)
        probs = ops.softmax(q @ k.transpose((0, 2, 1)) * HIDDEN**-0.5 + mask, axis=-1)
        mlp = self.mlp[1](ops.gelu(self.mlp[0](y)))
        return x + self.output(probs @ v) + self.adapter(mlp)


class Prefix(addons.Module):
    """Features of an image as the embeddings of the first positions."""

    def __init__(self):
        super().__init__()
        self.proj = Linear(HIDDEN)

    def build(self, features: popxl.Tensor) -> popxl.Tensor:
        return self.proj(features)


class Head(addons.Module):
    def __init__(self):
        super().__init__()
        self.ln_f, self.lm = LayerNorm(), Linear(VOCAB)

    def build(self, x: popxl.Tensor, labels: popxl.Tensor) -> popxl.Tensor:
        words = ops.slice(x, start=IMAGE - 1, stop=LENGTH - 1, axis=1)
        logits = self.lm(self.ln_f(words))
        return addons.cross_entropy(logits, labels)


class Magma:
    def __init__(self):
        ir = self.ir = popxl.Ir()
        with ir.main_graph, popxl.in_sequence():
            self.inputs = addons.InputStreams(
                image=((BATCH, IMAGE, 5), popxl.float32), words=((BATCH, WORDS), popxl.int32)
            )
            image, words = (ops.host_load(s) for s in self.inputs)
            self.variables, self.trained = NamedTensors(), {}
            self.grads: dict[str, popxl.Tensor] = {}
            self.optimise(self.loss(image, words))

    def _graph(self, name: str, module: addons.Module, *inputs: popxl.Tensor):
        facts, graph = module.create_graph(*inputs)
        self.variables.insert(name, facts.init(name))
        return graph

    def loss(self, image: popxl.Tensor, words: popxl.Tensor) -> popxl.Tensor:
        v = self.variables
        embed = self._graph("embedding", Embedding(popxl.float32, VOCAB, HIDDEN), words)
        prefix = self._graph("prefix", Prefix(), image)
        (e,) = embed.bind(v.embedding).call(words)
        prefix_info = prefix.bind(v.prefix).call_with_info(image)
        x = ops.concat([prefix_info.outputs[0], e], axis=1)
        facts, layer = Layer().create_graph(x)
        infos = []
        for i in range(LAYERS):
            v.insert(f"layer{i}", facts.init(f"layer{i}"))
            infos.append(layer.bind(v.get(f"layer{i}")).call_with_info(x))
            x = infos[-1].outputs[0]
        head = self._graph("head", Head(), x, words)
        head_info = head.bind(v.head).call_with_info(x, words)
        self.backward(prefix, prefix_info, layer, infos, head, head_info)
        return head_info.outputs[0]

    def backward(self, prefix, prefix_info, layer, infos, head, head_info) -> None:
        """Gradients of the adapters and the prefix, by name."""
        grad = addons.autodiff(head, grads_required=head.graph.inputs[:1])
        args = grad.grad_graph_info.inputs_dict(head_info)
        (dx,) = grad.call(popxl.constant(1.0), args=args)
        x, adapter = layer.graph.inputs[0], layer.args.adapter
        grad = addons.autodiff(layer, grads_required=[x, *adapter.values_flat()])
        for i in reversed(range(LAYERS)):
            args = grad.grad_graph_info.inputs_dict(infos[i])
            dx, *rest = grad.call(dx, args=args)
            names = (f"layer{i}.adapter.{n}" for n in adapter.keys_flat())
            self.grads.update(zip(names, rest, strict=True))
        grad = addons.autodiff(prefix, grads_required=prefix.args.values_flat())
        d_prefix = ops.slice(dx, stop=IMAGE, axis=1)
        grads = grad.call(d_prefix, args=grad.grad_graph_info.inputs_dict(prefix_info))
        names = (f"prefix.{n}" for n in prefix.args.keys_flat())
        self.grads.update(zip(names, grads, strict=True))

    def optimise(self, loss: popxl.Tensor) -> None:
        self.loss_stream = addons.host_store(loss)
        adam = AdamOptimizerStep(cache=True)
        for name, grad in self.grads.items():
            var = self.variables.get(name)
            facts, graph = adam.create_graph(
                var, grad.spec, lr=LR, eps=EPS, weight_decay=0.0, first_order_dtype=popxl.float32
            )
            graph.bind(facts.init(f"adam.{name}")).call(var, grad)

    def weights(self, model) -> addons.WeightsDict:
        """Returns the weights of a torch module whose parameters have these names."""
        out = addons.WeightsDict()
        theirs = dict(model.named_parameters())
        for name, t in self.variables.to_dict().items():
            data = to_numpy(theirs[name])
            is_linear = data.ndim == 2 and name != "embedding.weight"
            out[t] = data.T if is_linear else data
        return out

    def train(self, model, images: np.ndarray, words: np.ndarray):
        pairs = zip(images, words, strict=True)
        feeds = ({self.inputs.image: image, self.inputs.words: ids} for image, ids in pairs)
        outputs, trained = run_from_weights(self.ir, "ipu_model", self.weights(model), feeds)
        return [out[self.loss_stream] for out in outputs], trained
