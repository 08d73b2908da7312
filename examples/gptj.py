"""GPT-J fine-tuned by phased execution, as its public application does it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import popxl
import popxl_addons as addons
from examples.phases import Boundary, LossPhase, Phase, Port, apply_dropout, dropout_masks
from examples.runs import run_from_weights
from popxl import ops
from popxl.utils import to_numpy
from popxl_addons.layers import Embedding, LayerNorm, Linear
from popxl_addons.ops.rotary_pos_embed import rotary_pos_embed, trig_table_constants


@dataclass(frozen=True)
class Config:
    dtype: popxl.dtype = popxl.float32
    micro_batches: int = 2
    batch: int = 2
    length: int = 6
    vocab: int = 32
    hidden: int = 16
    heads: int = 2
    rotary: int = 4
    layers: int = 2
    dropout: float = 0.25
    lr: float = 0.1


class Block(addons.Module):
    """Attention and feed-forward side by side, each with dropout of its own."""

    def __init__(self, c: Config):
        super().__init__()
        self.config, self.norm = c, LayerNorm()
        self.q, self.k, self.v, self.out = (Linear(c.hidden, bias=False) for _ in range(4))
        self.up, self.down = Linear(4 * c.hidden), Linear(c.hidden)

    def build(self, x: popxl.Tensor, seed: popxl.Tensor) -> popxl.Tensor:
        first, second = ops.split_random_seed(seed)
        h, p = self.norm(x), self.config.dropout
        attention = apply_dropout(self.out(self.attention(h)), first, p)
        return x + attention + apply_dropout(self.down(ops.gelu(self.up(h))), second, p)

    def attention(self, h: popxl.Tensor) -> popxl.Tensor:
        c = self.config
        q, k, v = (
            t.reshape((c.batch, c.length, c.heads, c.hidden // c.heads))
            for t in (self.q(h), self.k(h), self.v(h))
        )
        sin, cos = trig_table_constants(c.length, c.rotary, dtype=c.dtype)
        q, k = (rotary_pos_embed(t, sin, cos, c.rotary) for t in (q, k))
        q, k, v = (t.transpose((0, 2, 1, 3)) for t in (q, k, v))
        future = np.triu(np.full((c.length, c.length), -1e4, np.float32), 1)
        scores = q @ k.transpose((0, 1, 3, 2)) * (c.hidden // c.heads) ** -0.5
        probs = ops.softmax(scores + popxl.constant(future, c.dtype), axis=-1)
        return (probs @ v).transpose((0, 2, 1, 3)).reshape(h.shape)


class Head(addons.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.norm, self.lm = LayerNorm(), Linear(c.vocab)

    def build(self, x: popxl.Tensor, labels: popxl.Tensor) -> popxl.Tensor:
        logits = ops.cast(self.lm(self.norm(x)), popxl.float32)
        return addons.cross_entropy(logits.reshape((-1, logits.shape[-1])), labels.flatten())


class TrainingSession:
    """A step of gradient descent over the micro-batches."""

    def __init__(self, c: Config):
        self.config, ir = c, popxl.Ir()
        self.ir, ir.num_host_transfers = ir, c.micro_batches
        words = popxl.TensorSpec((c.batch, c.length), popxl.int32)
        with ir.main_graph, popxl.in_sequence():
            self.words, self.labels = (popxl.h2d_stream(*words.to_tuple()) for _ in range(2))
            self.loss = popxl.d2h_stream((), popxl.float32)
            _, seed = addons.seed_variable(7)
            self.build_phases(words)
            self.step(ops.split_random_seed(seed, c.layers))

    def build_phases(self, words: popxl.TensorSpec) -> None:
        c, steps = self.config, self.config.micro_batches
        hidden = popxl.TensorSpec((c.batch, c.length, c.hidden), c.dtype)
        x = self.x = Boundary(hidden, steps, c.layers + 1)
        table = Embedding(c.dtype, c.vocab, c.hidden)
        self.embeddings = Phase("embeddings", table, [Port(words, self.words)], x.at(0), steps)
        self.blocks = Phase("block", Block(c), [x.at(0)], x.at(1), steps, c.layers, random=True)
        inputs = [x.at(c.layers), Port(words, self.labels)]
        self.head = LossPhase("head", Head(c), inputs, self.loss, steps)

    def step(self, seeds: tuple[popxl.Tensor, ...]) -> None:
        c = self.config
        self.embeddings.forward(0)
        for i, seed in enumerate(seeds):
            self.blocks.forward(i, seed)
        passes = [(self.head, 0), *((self.blocks, i) for i in reversed(range(c.layers))),
                  (self.embeddings, 0)]  # fmt: skip
        for phase, row in passes:
            phase.update(row, phase.backward(row), c.lr)
        self.dropout_masks = [
            dropout_masks(s, 2, self.x.spec, c.dropout, c.micro_batches) for s in seeds
        ]

    def weights(self, hf) -> addons.WeightsDict:
        """Returns the weights of a `transformers.GPTJForCausalLM`."""
        dtype, gpt, (head,) = self.config.dtype, hf.transformer, self.head.variables
        (embeddings,) = self.embeddings.variables
        out = addons.WeightsDict({embeddings.weight: to_numpy(gpt.wte.weight, dtype)})
        out.update(LayerNorm.torch_mapping(head.norm, gpt.ln_f, dtype))
        out.update(Linear.torch_mapping(head.lm, hf.lm_head, dtype))
        for ours, theirs in zip(self.blocks.variables, gpt.h, strict=True):
            out.update(LayerNorm.torch_mapping(ours.norm, theirs.ln_1, dtype))
            a, f = theirs.attn, theirs.mlp
            names = {"q": a.q_proj, "k": a.k_proj, "v": a.v_proj, "out": a.out_proj,
                     "up": f.fc_in, "down": f.fc_out}  # fmt: skip
            for name, layer in names.items():
                out.update(Linear.torch_mapping(ours.get(name), layer, dtype))
        return out

    def run(self, hf, words: np.ndarray, labels: np.ndarray):
        """Run a step from the weights of `hf`; returns losses, dropout masks and weights."""
        feed = {self.words: words, self.labels: labels}
        (out,), trained = run_from_weights(self.ir, "ipu_hw", self.weights(hf), [feed])
        kept = [[out[stream] for stream in layer] for layer in self.dropout_masks]
        return out[self.loss], kept, trained
