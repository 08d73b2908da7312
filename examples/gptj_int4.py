"""GPT-J with weights in 4 bits: the logits of a text, layer by layer from remote buffers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import popxl
import popxl_addons as addons
from popxl import ops
from popxl.utils import to_numpy
from popxl_addons import NamedTensors
from popxl_addons.layers import Embedding, LayerNorm, Linear
from popxl_addons.layers.linear_gq import LinearGQ
from popxl_addons.ops.group_quantize_decompress import (
    group_quantize_compress_numpy,
    group_quantize_decompress_numpy,
)
from popxl_addons.ops.rotary_pos_embed import rotary_pos_embed, trig_table_constants
from popxl_addons.remote import load_remote_graph, named_variable_buffers


@dataclass(frozen=True)
class Config:
    batch: int = 2
    sequence: int = 5
    vocab: int = 48
    hidden: int = 32
    heads: int = 2
    rotary_dim: int = 8
    layers: int = 2
    group_size: int = 8


class Attention(addons.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.qkv = LinearGQ(3 * config.hidden, bias=False, group_size=config.group_size, dim=0)
        self.output = LinearGQ(config.hidden, bias=False, group_size=config.group_size, dim=0)

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        c = self.config
        size = c.hidden // c.heads
        shape = (c.batch, c.sequence, c.heads, size)
        q, k, v = (t.reshape(shape) for t in ops.split(self.qkv(x), 3, axis=-1))
        sin, cos = trig_table_constants(c.sequence, c.rotary_dim)
        q, k = (rotary_pos_embed(t, sin, cos, c.rotary_dim) for t in (q, k))
        q, k, v = (t.transpose((0, 2, 1, 3)) for t in (q, k, v))
        mask = popxl.constant(np.triu(np.full((c.sequence, c.sequence), -1e4), 1), x.dtype)
        probs = ops.softmax(q @ k.transpose((0, 1, 3, 2)) * size**-0.5 + mask, axis=-1)
        return self.output((probs @ v).transpose((0, 2, 1, 3)).reshape(x.shape))


class Block(addons.Module):
    """Attention and feed-forward read the same normalised input."""

    def __init__(self, config: Config):
        super().__init__()
        self.ln_1 = LayerNorm()
        self.attention = Attention(config)
        self.fc_in = LinearGQ(4 * config.hidden, group_size=config.group_size, dim=0)
        self.fc_out = LinearGQ(config.hidden, group_size=config.group_size, dim=0)

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        y = self.ln_1(x)
        return x + self.attention(y) + self.fc_out(ops.gelu(self.fc_in(y)))


class Head(addons.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.ln_f, self.lm = LayerNorm(), Linear(config.vocab)

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        return self.lm(self.ln_f(x))


class GPTJ:
    def __init__(self, config: Config):
        c = self.config = config
        ir = self.ir = popxl.Ir()
        with ir.main_graph, popxl.in_sequence():
            self.stream = popxl.h2d_stream((c.batch, c.sequence), popxl.int32)
            words = ops.host_load(self.stream)
            facts, embed = Embedding(popxl.float32, c.vocab, c.hidden).create_graph(words)
            self.embedding = facts.init("embedding")
            (x,) = embed.bind(self.embedding).call(words)
            facts, block = Block(c).create_graph(x)
            buffers = named_variable_buffers(facts, entries=c.layers)
            self.layers = [facts.init_remote(buffers, i, f"layer{i}") for i in range(c.layers)]
            load, names = load_remote_graph(buffers)
            i = popxl.constant(0, popxl.int32)

            def one_layer(x: popxl.Tensor, i: popxl.Tensor):
                (x,) = block.bind(NamedTensors.pack(names, load.call(i))).call(x)
                return x, i + 1

            x, _ = ops.repeat(ir.create_graph(one_layer, x, i), c.layers, x, i)
            facts, head = Head(c).create_graph(x)
            self.head = facts.init("head")
            (logits,) = head.bind(self.head).call(x)
            self.logits = addons.host_store(logits)

    def quantised(self, variables: NamedTensors, weight: np.ndarray) -> addons.WeightsDict:
        """Quantize a matrix (inputs, outputs) into the variables of a LinearGQ."""
        parts = group_quantize_compress_numpy(weight, self.config.group_size, dim=0)
        names = "weight_compressed", "weight_decompression_scale", "weight_decompression_bias"
        return addons.WeightsDict({variables.get(n): a for n, a in zip(names, parts, strict=True)})

    def weights(self, hf) -> addons.WeightsDict:
        """Returns the weights of a `transformers.GPTJForCausalLM`."""
        c, gpt = self.config, hf.transformer
        out = addons.WeightsDict({self.embedding.weight: to_numpy(gpt.wte.weight)})
        out.update(LayerNorm.torch_mapping(self.head.ln_f, gpt.ln_f))
        out.update(Linear.torch_mapping(self.head.lm, hf.lm_head))
        for ours, theirs in zip(self.layers, gpt.h, strict=True):
            out.update(LayerNorm.torch_mapping(ours.ln_1, theirs.ln_1))
            attn = theirs.attn
            qkv = [to_numpy(p.weight).T for p in (attn.q_proj, attn.k_proj, attn.v_proj)]
            out.update(self.quantised(ours.attention.qkv, np.hstack(qkv)))
            out.update(self.quantised(ours.attention.output, to_numpy(attn.out_proj.weight).T))
            for name in ("fc_in", "fc_out"):
                layer = getattr(theirs.mlp, name)
                mapped = LinearGQ.torch_mapping(
                    ours.get(name), layer, group_size=c.group_size, dim=0
                )
                out.update(mapped)
        return out

    def run(self, hf, words: np.ndarray) -> np.ndarray:
        with popxl.Session(self.ir, "ipu_model") as session:
            session.write_variables_data(self.weights(hf))
            return session.run({self.stream: words.astype(np.int32)})[self.logits]


def round_to_int4(weight: np.ndarray, group_size: int) -> np.ndarray:
    """Round a matrix (inputs, outputs) to 4 bits."""
    parts = group_quantize_compress_numpy(weight, group_size, dim=0)
    return group_quantize_decompress_numpy(*parts, dim=0).astype(np.float32)
