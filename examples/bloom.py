"""BLOOM: the next token's logits, with weights in remote buffers and tensor parallelism.

Layers run in a loop over the entries of the buffers. Heads and the features of the feed-forward are
cut over all replicas, and so is the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import popxl
import popxl_addons as addons
from popxl import ops
from popxl.utils import to_numpy
from popxl_addons import NamedTensors
from popxl_addons.array_munging import pad_axis, shard, tensor_parallel_input
from popxl_addons.layers import Embedding, LayerNorm, Linear
from popxl_addons.ops.replicated_all_reduce_TP import replicated_all_reduce
from popxl_addons.patterns import apply_pre_alias_patterns
from popxl_addons.remote import load_remote_graph, named_variable_buffers


@dataclass(frozen=True)
class Config:
    replicas: int = 2
    batch: int = 2
    sequence: int = 6
    vocab: int = 40
    hidden: int = 16
    heads: int = 4
    layers: int = 3
    eps: float = 1e-5


def slopes(heads: int) -> np.ndarray:
    """ALiBi's slope of each head, for a power of two of heads (Press et al., 2021)."""
    return 2.0 ** (-8.0 * np.arange(1, heads + 1) / heads)


class Attention(addons.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        alone = popxl.gcg().ir.replica_grouping(group_size=1)
        self.heads = config.heads // config.replicas
        self.qkv = Linear(3 * config.hidden // config.replicas, replica_grouping=alone)
        self.dense = Linear(config.hidden, bias=False, replica_grouping=alone)

    def build(self, x: popxl.Tensor, bias: popxl.Tensor) -> popxl.Tensor:
        """bias: (heads, sequence, sequence), of this replica's heads."""
        c = self.config
        size = c.hidden // c.heads
        fused = self.qkv(x).reshape((c.batch, c.sequence, self.heads, 3, size))
        q, k, v = (ops.squeeze(t, [3]) for t in ops.split(fused, 3, axis=3))
        q, k, v = (t.transpose((0, 2, 1, 3)) for t in (q, k, v))
        scores = q @ k.transpose((0, 1, 3, 2)) * size**-0.5 + bias
        z = ops.softmax(scores, axis=-1) @ v
        z = z.transpose((0, 2, 1, 3)).reshape((c.batch, c.sequence, self.heads * size))
        y = replicated_all_reduce(self.dense(z))
        return y + self.add_variable_input("bias", lambda: np.zeros(c.hidden), x.dtype)


class Block(addons.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        alone = popxl.gcg().ir.replica_grouping(group_size=1)
        self.ln_1 = LayerNorm()
        self.attention = Attention(config)
        self.ln_2 = LayerNorm()
        self.up = Linear(4 * config.hidden // config.replicas, replica_grouping=alone)
        self.down = Linear(config.hidden, bias=False, replica_grouping=alone)

    def build(self, x: popxl.Tensor, bias: popxl.Tensor) -> popxl.Tensor:
        x = x + self.attention(self.ln_1(x), bias)
        y = replicated_all_reduce(self.down(ops.gelu(self.up(self.ln_2(x)))))
        return x + y + self.add_variable_input("bias", lambda: np.zeros(x.shape[-1]), x.dtype)


class VocabularyEmbedding(addons.Module):
    """Embedding of a vocabulary that is sharded over the replicas."""

    def __init__(self, config: Config):
        super().__init__()
        c = self.config = config
        self.alone = popxl.gcg().ir.replica_grouping(group_size=1)
        self.words = Embedding(popxl.float32, c.vocab, c.hidden, replica_grouping=self.alone)
        self.norm = LayerNorm()

    def build(self, words: popxl.Tensor) -> popxl.Tensor:
        first = self.add_variable_input(
            "first", iter(self.words.offsets), popxl.int32, replica_grouping=self.alone
        )
        return self.norm(replicated_all_reduce(self.words(words - first)))


class Head(addons.Module):
    """Logits of the whole vocabulary at each sequence's last token."""

    def __init__(self):
        super().__init__()
        self.ln_f = LayerNorm()

    def build(self, x: popxl.Tensor, last: popxl.Tensor, table: popxl.Tensor) -> popxl.Tensor:
        rows = [ops.dynamic_slice(x[i], last[i], [0], [1], True) for i in range(x.shape[0])]
        logits = self.ln_f(ops.concat(rows, axis=0)) @ table.T
        return ops.collectives.replicated_all_gather(logits, axis=1)


class Bloom:
    def __init__(self, config: Config):
        c = self.config = config
        ir = self.ir = popxl.Ir(replication=c.replicas)
        with ir.main_graph, popxl.in_sequence():
            self.inputs = addons.InputStreams(
                words=((c.batch, c.sequence), popxl.int32), last=((c.batch,), popxl.int32)
            )
            words, last = (ops.host_load(s) for s in self.inputs)
            facts, embed = VocabularyEmbedding(c).create_graph(words)
            self.words = facts.init("words")
            (x,) = embed.bind(self.words).call(words)
            x = self.run_layers(x)
            table = self.words.words.weight
            facts, head = Head().create_graph(x, last, table)
            self.head = facts.init("head")
            (logits,) = head.bind(self.head).call(x, last, table)
            self.outputs = addons.OutputStreams(logits=(logits.shape, logits.dtype))
            ops.host_store(self.outputs.logits, logits)
        apply_pre_alias_patterns(ir)

    def run_layers(self, x: popxl.Tensor) -> popxl.Tensor:
        """All layers, in a loop that loads a layer's weights in each iteration."""
        c, ir = self.config, self.ir
        heads = c.heads // c.replicas
        bias = popxl.variable(
            shard(self.alibi(), c.replicas, 0), popxl.float32, "alibi",
            replica_grouping=ir.replica_grouping(group_size=1),
        )  # fmt: skip
        assert bias.shape == (heads, c.sequence, c.sequence)
        facts, block = Block(c).create_graph(x, bias)
        buffers = named_variable_buffers(facts, c.layers, shard_over_dict=False)
        self.layers = [facts.init_remote(buffers, i, f"layer{i}") for i in range(c.layers)]
        load, names = load_remote_graph(buffers, c.layers)

        def one_layer(x: popxl.Tensor, i: popxl.Tensor, bias: popxl.Tensor):
            (x,) = block.bind(NamedTensors.pack(names, load.call(i))).call(x, bias)
            return x, i + 1

        first = popxl.constant(0, popxl.int32)
        return ops.repeat(ir.create_graph(one_layer, x, first, bias), c.layers, x, first, bias)[0]

    def alibi(self) -> np.ndarray:
        """(heads, sequence, sequence): distances to the keys, and none to later ones."""
        c = self.config
        at = np.arange(c.sequence)
        bias = slopes(c.heads)[:, None, None] * at[None, None, :]
        return bias + np.where(at[None, :] > at[:, None], -1e4, 0)

    def weights(self, hf) -> addons.WeightsDict:
        """Returns the weights of a `transformers.BloomForCausalLM`, with fused q, k, v."""
        c, n, out = self.config, self.config.replicas, addons.WeightsDict()
        bloom = hf.transformer
        rows = Embedding.get_vocab_shard_size(c.vocab, n) * n
        table = pad_axis(to_numpy(bloom.word_embeddings.weight), rows, axis=0)
        out[self.words.words.weight] = shard(table, n, axis=0)
        out.update(LayerNorm.torch_mapping(self.words.norm, bloom.word_embeddings_layernorm))
        out.update(LayerNorm.torch_mapping(self.head.ln_f, bloom.ln_f))
        for ours, theirs in zip(self.layers, bloom.h, strict=True):
            attention, mlp = theirs.self_attention, theirs.mlp
            out.update(LayerNorm.torch_mapping(ours.ln_1, theirs.input_layernorm))
            out.update(LayerNorm.torch_mapping(ours.ln_2, theirs.post_attention_layernorm))
            for up, layer in ((ours.attention.qkv, attention.query_key_value),
                              (ours.up, mlp.dense_h_to_4h)):  # fmt: skip
                out[up.weight] = shard(to_numpy(layer.weight).T, n, axis=1)
                out[up.bias] = shard(to_numpy(layer.bias), n, axis=0)
            for down, layer in ((ours.attention.dense, attention.dense),
                                (ours.down, mlp.dense_4h_to_h)):  # fmt: skip
                out[down.weight] = shard(to_numpy(layer.weight).T, n, axis=0)
            out[ours.attention.bias] = to_numpy(attention.dense.bias)
            out[ours.bias] = to_numpy(mlp.dense_4h_to_h.bias)
        return out

    def next_logits(self, hf, words: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Logits (batch, vocabulary) behind the first `lengths` of the words."""
        c, n = self.config, self.config.replicas
        data = {self.inputs.words: words.astype(np.int32), self.inputs.last: lengths - 1}
        with popxl.Session(self.ir, "ipu_model") as session:
            session.write_variables_data(self.weights(hf))
            # Each replica of the one tensor-parallel group gets the same batch.
            feeds = {
                s: tensor_parallel_input(a[None].astype(np.int32), n, n) for s, a in data.items()
            }
            logits = session.run(feeds)[self.outputs.logits]
        np.testing.assert_array_equal(logits[0], logits[-1])
        return logits[0][:, : c.vocab]
