"""BERT's masked language model, whose head reads its weight from the word embeddings.

The layers are one graph each, created once; the tied weight has one accumulator, to which the
gradients of both its uses are added.
"""

from __future__ import annotations

import numpy as np

import popxl
import popxl_addons as addons
from examples.bert_squad import Config, Embeddings, Layer, encoder_weights
from examples.runs import run_from_weights
from popxl import ops
from popxl.utils import to_numpy
from popxl_addons import NamedTensors
from popxl_addons.layers import Embedding, LayerNorm, Linear


class Predictions(addons.Module):
    """Logits of all words at the masked positions. The decoder's weight is an input."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.dense = Linear(config.hidden)
        self.norm = LayerNorm()

    def build(self, x: popxl.Tensor, positions: popxl.Tensor, weight: popxl.Tensor):
        c = self.config
        rows = x.reshape((c.batch * c.sequence, c.hidden))
        x = ops.gather(rows, positions.flatten(), axis=0)
        x = self.norm(ops.gelu(self.dense(x)), eps=c.eps)
        bias = self.add_variable_input("bias", lambda: np.zeros(c.vocab), x.dtype)
        words = ops.slice(weight, stop=c.vocab, axis=0)  # without the rows that pad the table
        return x @ words.T + bias


def stack(config: Config, inputs: addons.InputStreams):
    """Forward and gradient graphs of the three kinds of layer, by name."""
    hidden = popxl.TensorSpec((config.batch, config.sequence, config.hidden), popxl.float32)
    rows = Embedding.get_vocab_shard_size(config.vocab, 1)
    table = popxl.TensorSpec((rows, config.hidden), popxl.float32)
    graphs = {
        "embeddings": Embeddings(config).create_graph(inputs.words.spec, inputs.token_type.spec),
        "layer": Layer(config).create_graph(hidden, inputs.mask.spec),
        "head": Predictions(config).create_graph(hidden, inputs.positions.spec, table),
    }
    wanted = {"embeddings": [], "layer": [0], "head": [0, 2]}
    layers = {}
    for name, (facts, fwd) in graphs.items():
        required = [fwd.graph.inputs[i] for i in wanted[name]]
        accum, grad = addons.autodiff_with_accumulation(fwd, fwd.args.tensors, None, required)
        layers[name] = facts, fwd, accum, grad
    return layers


class MaskedLM:
    """One step of gradient descent on a batch, with gradients accumulated by layer."""

    def __init__(self, config: Config, masked: int):
        c = self.config = config
        ir = self.ir = popxl.Ir()
        ints = ((c.batch, c.sequence), popxl.int32)
        with ir.main_graph, popxl.in_sequence():
            spec = ((c.batch, masked), popxl.int32)
            s = self.inputs = addons.InputStreams(
                words=ints, token_type=ints, mask=ints, positions=spec, labels=spec
            )
            self.outputs = addons.OutputStreams(loss=((), popxl.float32))
            values = {name: ops.host_load(stream) for name, stream in s.items()}
            self.graphs = stack(c, s)
            names = ["embeddings", *(f"layer{i}" for i in range(c.layers)), "head"]
            kinds = [name.rstrip("0123456789") for name in names]
            self.variables = NamedTensors.from_dict(
                {n: self.graphs[k][0].init(n) for n, k in zip(names, kinds, strict=True)}
            )
            self.accumulators = NamedTensors.from_dict(
                {n: self.graphs[k][2].init(n) for n, k in zip(names, kinds, strict=True)}
            )
            self.step(values)

    def step(self, t: dict[str, popxl.Tensor]):
        variables, calls = self.variables, []

        def run(name: str, kind: str, *inputs: popxl.Tensor) -> popxl.Tensor:
            fwd = self.graphs[kind][1]
            info = fwd.bind(variables.get(name)).call_with_info(*inputs)
            calls.append((name, kind, info))
            return info.outputs[0]

        x = run("embeddings", "embeddings", t["words"], t["token_type"])
        for i in range(self.config.layers):
            x = run(f"layer{i}", "layer", x, t["mask"])
        tied = variables.embeddings.word.weight
        # Labels have the shape of the batch; logits a row for each of them.
        logits = run("head", "head", x, self.flat(t["positions"]), tied)
        loss, dx = addons.cross_entropy_with_grad(logits, t["labels"], ignore_index=-1)
        ops.host_store(self.outputs.loss, loss)
        for name, kind, info in reversed(calls):
            *_, grad = self.graphs[kind]
            accumulators = self.accumulators.get(name)
            values = grad.grad_graph_info.inputs_dict(info)
            outputs = grad.bind(accumulators).call(*([dx] if dx else []), args=values)
            if name == "head":
                dx, d_tied = outputs
            else:
                dx = outputs[0] if outputs else None
        # The mean of the first gradient forgets what was there, so the other use is added last.
        ops.add_(self.accumulators.embeddings.accum.word.weight, d_tied)
        self.descend()

    def flat(self, positions: popxl.Tensor) -> popxl.Tensor:
        """Positions in the batch, from those in its sequences."""
        c = self.config
        first = np.arange(c.batch)[:, None] * c.sequence
        return positions + popxl.constant(first, popxl.int32)

    def descend(self):
        for name, accumulator in self.accumulators.to_dict().items():
            layer, _, rest = name.partition(".")
            if rest == "mean_accum_counter":
                ops.var_updates.accumulator_zero_(accumulator)
                continue
            variable = self.variables.get(f"{layer}.{rest.removeprefix('accum.')}")
            ops.scaled_add_(variable, accumulator, b=-self.config.lr)
            ops.var_updates.accumulator_zero_(accumulator)

    def train(self, weights, batches):
        feeds = ({self.inputs[n]: a for n, a in batch.items()} for batch in batches)
        outputs, trained = run_from_weights(self.ir, "ipu_model", weights, feeds)
        return [out[self.outputs.loss] for out in outputs], trained

    def weights(self, hf) -> addons.WeightsDict:
        """Returns the weights of a `transformers.BertForMaskedLM`."""
        v = self.variables
        layers = (v.get(f"layer{i}") for i in range(self.config.layers))
        out, head = encoder_weights(v.embeddings, layers, hf.bert), hf.cls.predictions
        out.update(Linear.torch_mapping(v.head.dense, head.transform.dense))
        out.update(LayerNorm.torch_mapping(v.head.norm, head.transform.LayerNorm))
        out[v.head.bias] = to_numpy(head.bias)
        return out
