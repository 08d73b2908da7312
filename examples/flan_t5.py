"""FLAN-T5 fine-tuned by phased execution, as its public application does it.

Encoder and decoder each have a table of relative positions. Their layers get it passed with each
call, add to its gradient, and keep nothing of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import popxl
import popxl_addons as addons
from examples.phases import (
    Boundary,
    LossPhase,
    Phase,
    Port,
    apply_dropout,
    dropout_masks,
    fixed_row,
)
from examples.runs import run_from_weights
from popxl import ops
from popxl.utils import to_numpy
from popxl_addons.layers import Embedding, Linear
from popxl_addons.transforms.batch_serialisation import RemoteHandle, batch_serialise


@dataclass(frozen=True)
class Config:
    dtype: popxl.dtype = popxl.float32
    micro_batches: int = 2
    batch: int = 2
    length: int = 6
    target_length: int = 4
    vocab: int = 32
    hidden: int = 16
    heads: int = 2
    ff: int = 24
    buckets: int = 8
    layers: int = 2
    dropout: float = 0.25
    eps: float = 1e-6
    lr: float = 0.05


class Norm(addons.Module):
    """Root mean square norm."""

    def __init__(self, c: Config):
        super().__init__()
        self.config = c

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        weight = self.add_variable_input("weight", lambda: np.ones(x.shape[-1]), x.dtype)
        wide = ops.cast(x, popxl.float32)
        size = ops.sqrt(ops.mean(wide * wide, [-1], keepdims=True) + self.config.eps)
        return ops.cast(wide / size, x.dtype) * weight


class Attention(addons.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.config, self.norm = c, Norm(c)
        self.q, self.k, self.v, self.o = (Linear(c.hidden, bias=False) for _ in range(4))

    def build(self, x: popxl.Tensor, memory: popxl.Tensor | None, bias: popxl.Tensor | None):
        h = self.norm(x)
        source = h if memory is None else memory
        q, k, v = (self.heads(t) for t in (self.q(h), self.k(source), self.v(source)))
        scores = ops.cast(q @ k.transpose((0, 1, 3, 2)), popxl.float32)
        probs = ops.softmax(scores if bias is None else scores + bias, axis=-1)
        z = ops.cast(probs, x.dtype) @ v
        return self.o(z.transpose((0, 2, 1, 3)).reshape(x.shape))

    def heads(self, t: popxl.Tensor) -> popxl.Tensor:
        c = self.config
        return t.reshape((*t.shape[:2], c.heads, c.hidden // c.heads)).transpose((0, 2, 1, 3))


class FeedForward(addons.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.norm = Norm(c)
        self.gate, self.up = Linear(c.ff, bias=False), Linear(c.ff, bias=False)
        self.down = Linear(c.hidden, bias=False)

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        h = self.norm(x)
        return self.down(ops.gelu(self.gate(h)) * self.up(h))


class Block(addons.Module):
    """A layer of the encoder, or with `cross` of the decoder.

    Args:
        buckets: of each pair of positions, int32 (length, length).
    """

    def __init__(self, c: Config, buckets: np.ndarray, cross: bool = False):
        super().__init__()
        self.config, self.buckets = c, buckets.astype(np.int32)
        self.attention, self.ff = Attention(c), FeedForward(c)
        if cross:
            self.cross = Attention(c)

    def build(self, x: popxl.Tensor, *more: popxl.Tensor) -> popxl.Tensor:
        *memory, seed, table = more
        p, seeds = self.config.dropout, ops.split_random_seed(seed, 2 + len(memory))
        x = x + apply_dropout(self.attention(x, None, self.bias(table)), seeds[0], p)
        if memory:
            x = x + apply_dropout(self.cross(x, memory[0], None), seeds[1], p)
        return x + apply_dropout(self.ff(x), seeds[-1], p)

    def bias(self, table: popxl.Tensor) -> popxl.Tensor:
        """(1, heads, length, length); a decoder's positions do not see later ones."""
        rows = ops.gather(table, popxl.constant(self.buckets, popxl.int32))
        bias = ops.cast(rows.transpose((2, 0, 1)), popxl.float32)
        bias = bias.reshape((1, *bias.shape))
        if hasattr(self, "cross"):
            future = np.triu(np.full(self.buckets.shape, -1e9, np.float32), 1)
            bias = bias + popxl.constant(future, popxl.float32)
        return bias


class Head(addons.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.norm, self.lm = Norm(c), Linear(c.vocab, bias=False)

    def build(self, x: popxl.Tensor, labels: popxl.Tensor) -> popxl.Tensor:
        logits = ops.cast(self.lm(self.norm(x)), popxl.float32)
        return addons.cross_entropy(logits.reshape((-1, logits.shape[-1])), labels.flatten())


class TrainingSession:
    """A step of gradient descent over the micro-batches.

    Args:
        buckets: of the encoder's and the decoder's pairs of positions.
    """

    def __init__(self, c: Config, buckets: tuple[np.ndarray, np.ndarray]):
        self.config, ir = c, popxl.Ir()
        self.ir, ir.num_host_transfers = ir, c.micro_batches
        lengths = (c.length, c.target_length, c.target_length)
        with ir.main_graph, popxl.in_sequence():
            self.streams = [popxl.h2d_stream((c.batch, n), popxl.int32) for n in lengths]
            self.loss = popxl.d2h_stream((), popxl.float32)
            table = np.zeros((c.buckets, c.heads))
            self.tables = [popxl.variable(table, c.dtype, name) for name in ("encoder", "decoder")]
            _, seed = addons.seed_variable(7)
            self.build_phases(*buckets)
            self.step(ops.split_random_seed(seed, 2 * c.layers))

    def build_phases(self, buckets: np.ndarray, target_buckets: np.ndarray) -> None:
        c, steps = self.config, self.config.micro_batches
        words, target_words, labels = (Port(s.spec, s) for s in self.streams)
        x, y = (
            Boundary(popxl.TensorSpec((c.batch, n, c.hidden), c.dtype), steps, c.layers + 2)
            for n in (c.length, c.target_length)
        )
        self.x, self.y = x, y
        last = c.layers + 1  # the row of what the encoder's last norm gives
        self.d_memory = popxl.remote_buffer(x.spec.shape, c.dtype, steps * c.layers)
        memory = Port(x.spec, RemoteHandle(x.x, fixed_row(last)), RemoteHandle(self.d_memory))
        tables = [table.spec for table in self.tables[:1]]
        table = Embedding(c.dtype, c.vocab, c.hidden)
        self.words = Phase("words", table, [words], x.at(0), steps)
        self.targets = Phase("targets", table, [target_words], y.at(0), steps, owner=self.words)
        self.encoder = Phase("encoder", Block(c, buckets), [x.at(0)], x.at(1), steps, c.layers,
                             random=True, passed=tables)  # fmt: skip
        self.norm = Phase("norm", Norm(c), [x.at(c.layers)], x.at(last), steps)
        self.decoder = Phase("decoder", Block(c, target_buckets, cross=True), [y.at(0), memory],
                             y.at(1), steps, c.layers, random=True, passed=tables)  # fmt: skip
        self.head = LossPhase("head", Head(c), [y.at(c.layers), labels], self.loss, steps)

    def step(self, seeds: tuple[popxl.Tensor, ...]) -> None:
        c, (table, target_table) = self.config, self.tables
        stacks = [(self.encoder, table, seeds[: c.layers]),
                  (self.decoder, target_table, seeds[c.layers :])]  # fmt: skip
        for embeddings, (stack, own, own_seeds), after in zip(
            (self.words, self.targets), stacks, (self.norm, None), strict=True
        ):
            embeddings.forward(0)
            for i, seed in enumerate(own_seeds):
                stack.forward(i, seed, own)
            if after:
                after.forward(0)
        self.head.update(0, self.head.backward(0), c.lr)
        self.backward(self.decoder, target_table)
        self.sum_of_memory_gradients()
        self.norm.update(0, self.norm.backward(0), c.lr)
        self.backward(self.encoder, table)
        grads = self.words.backward(0)
        for name, grad in self.targets.backward(0).to_dict().items():
            ops.add_(grads.get(name), grad)
        self.words.update(0, grads, c.lr)
        specs = [(self.x.spec, 2), (self.y.spec, 3)]
        self.dropout_masks = [
            [dropout_masks(seed, count, spec, c.dropout, c.micro_batches) for seed in own_seeds]
            for (_, _, own_seeds), (spec, count) in zip(stacks, specs, strict=True)
        ]

    def backward(self, stack: Phase, table: popxl.Tensor) -> None:
        """Run the layers from last to first; each adds to the gradient of the position biases."""
        total = ops.init(table.shape, table.dtype)
        for i in reversed(range(self.config.layers)):
            grads = stack.backward(i)
            (own,) = (grad for name, grad in grads.to_dict().items() if name.startswith("more"))
            ops.add_(total, own)
            stack.update(i, grads, self.config.lr)
        ops.scaled_add_(table, total, b=-self.config.lr)

    def sum_of_memory_gradients(self) -> None:
        """Sum the gradients of all decoder layers into that of the encoder's output."""
        c, spec = self.config, self.x.spec
        graph = self.ir.create_graph(lambda *parts: sum(parts[1:], parts[0]), *[spec] * c.layers)
        loads = {t: RemoteHandle(self.d_memory, i) for i, t in enumerate(graph.inputs)}
        store = {graph.outputs[0]: RemoteHandle(self.x.dx, c.layers + 1)}
        named = addons.GraphWithNamedArgs(graph)
        batch_serialise(named, c.micro_batches, loads, {}, store).graph.call(0)

    def weights(self, hf) -> addons.WeightsDict:
        """Returns the weights of a `transformers.T5ForConditionalGeneration`."""
        dtype, out = self.config.dtype, addons.WeightsDict()
        (words,), (norm,), (head,) = (p.variables for p in (self.words, self.norm, self.head))
        pairs = {words.weight: hf.shared, norm.weight: hf.encoder.final_layer_norm,
                 head.norm.weight: hf.decoder.final_layer_norm}  # fmt: skip
        out.update({t: to_numpy(layer.weight, dtype) for t, layer in pairs.items()})
        out.update(Linear.torch_mapping(head.lm, hf.lm_head, dtype))
        for phase, table, stack in ((self.encoder, self.tables[0], hf.encoder),
                                    (self.decoder, self.tables[1], hf.decoder)):  # fmt: skip
            relative = stack.block[0].layer[0].SelfAttention.relative_attention_bias
            out[table] = to_numpy(relative.weight, dtype)
            for ours, theirs in zip(phase.variables, stack.block, strict=True):
                first, *cross, last = theirs.layer
                self._attention(out, ours.attention, first, first.SelfAttention)
                for layer in cross:
                    self._attention(out, ours.cross, layer, layer.EncDecAttention)
                out[ours.ff.norm.weight] = to_numpy(last.layer_norm.weight, dtype)
                ff = last.DenseReluDense
                for name, linear in {"gate": ff.wi_0, "up": ff.wi_1, "down": ff.wo}.items():
                    out.update(Linear.torch_mapping(ours.ff.get(name), linear, dtype))
        return out

    def _attention(self, out: addons.WeightsDict, ours, layer, attention) -> None:
        dtype = self.config.dtype
        out[ours.norm.weight] = to_numpy(layer.layer_norm.weight, dtype)
        for name in "qkvo":
            out.update(Linear.torch_mapping(ours.get(name), getattr(attention, name), dtype))

    def run(self, hf, words: np.ndarray, targets: np.ndarray, labels: np.ndarray):
        """Run a step from the weights of `hf`; returns losses, dropout masks and weights."""
        feed = dict(zip(self.streams, (words, targets, labels), strict=True))
        (out,), trained = run_from_weights(self.ir, "ipu_hw", self.weights(hf), [feed])
        kept = [[[out[s] for s in layer] for layer in stack] for stack in self.dropout_masks]
        return out[self.loss], kept, trained
