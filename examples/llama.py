"""LLaMA: greedy generation with key and value caches, all tokens in one run.

The caches are tensors that the loop over tokens carries on; each layer's graph writes its new row
into them in place.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import popxl
import popxl_addons as addons
from popxl import ops
from popxl.utils import to_numpy
from popxl_addons import NamedTensors
from popxl_addons.layers import Embedding, Linear


@dataclass(frozen=True)
class Config:
    batch: int = 2
    prompt: int = 4
    new: int = 6
    vocab: int = 48
    hidden: int = 16
    intermediate: int = 24
    heads: int = 4
    layers: int = 2
    eps: float = 1e-6

    @property
    def size(self) -> int:
        return self.hidden // self.heads

    @property
    def length(self) -> int:
        return self.prompt + self.new


class RMSNorm(addons.Module):
    def __init__(self, eps: float):
        super().__init__()
        self.eps = eps

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        w = self.add_variable_input("weight", lambda: np.ones(x.shape[-1]), x.dtype)
        mean = ops.mean(x * x, axis=-1, keepdims=True)
        return x / ops.sqrt(mean + self.eps) * w


def rotate_halves(x: popxl.Tensor, sin: popxl.Tensor, cos: popxl.Tensor) -> popxl.Tensor:
    """LLaMA pairs feature i with feature i + size / 2."""
    first, second = ops.split(x, 2, axis=-1)
    return x * cos + ops.concat([ops.negate(second), first], axis=-1) * sin


class Attention(addons.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.q, self.k, self.v, self.o = (Linear(config.hidden, bias=False) for _ in range(4))

    def build(
        self,
        x: popxl.Tensor,
        keys: popxl.TensorByRef,
        values: popxl.TensorByRef,
        step: popxl.Tensor,
    ) -> popxl.Tensor:
        """x: (batch, hidden), the token at position `step`."""
        c = self.config
        shape = (c.batch, c.heads, 1, c.size)
        q, k, v = (layer(x).reshape(shape) for layer in (self.q, self.k, self.v))
        sin, cos = self.angles(step)
        ops.dynamic_update_(keys, step, rotate_halves(k, sin, cos), [2], [1], True)
        ops.dynamic_update_(values, step, v, [2], [1], True)
        scores = rotate_halves(q, sin, cos) @ keys.transpose((0, 1, 3, 2)) * c.size**-0.5
        later = ops.greater(popxl.constant(np.arange(c.length), popxl.int32), step)
        hidden = ops.where(later, popxl.constant(-1e4), popxl.constant(0.0))
        z = ops.softmax(scores + hidden, axis=-1) @ values
        return self.o(z.reshape((c.batch, c.hidden)))

    def angles(self, step: popxl.Tensor) -> tuple[popxl.Tensor, popxl.Tensor]:
        c = self.config
        frequency = 1.0 / 10000 ** (np.arange(0, c.size, 2) / c.size)
        angle = ops.cast(step, popxl.float32) * popxl.constant(np.tile(frequency, 2), popxl.float32)
        return ops.sin(angle), ops.cos(angle)


class Block(addons.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.ln_1, self.ln_2 = RMSNorm(config.eps), RMSNorm(config.eps)
        self.attention = Attention(config)
        self.gate = Linear(config.intermediate, bias=False)
        self.up = Linear(config.intermediate, bias=False)
        self.down = Linear(config.hidden, bias=False)

    @popxl.in_sequence()
    def build(
        self,
        x: popxl.Tensor,
        keys: popxl.TensorByRef,
        values: popxl.TensorByRef,
        step: popxl.Tensor,
    ) -> popxl.Tensor:
        x = x + self.attention(self.ln_1(x), keys, values, step)
        y = self.ln_2(x)
        return x + self.down(ops.swish(self.gate(y)) * self.up(y))


class Llama(addons.Module):
    """Computes the next token from one token, and updates the caches."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.embedding = Embedding(popxl.float32, config.vocab, config.hidden)
        self.block = Block(config)
        self.norm = RMSNorm(config.eps)
        self.head = Linear(config.vocab, bias=False)

    @popxl.in_sequence()
    def build(self, words: popxl.Tensor, step: popxl.Tensor, caches: list[popxl.Tensor]):
        x = self.embedding(words)
        # One graph for all layers, called with variables of their own.
        facts, block = self.block.create_graph(x, caches[0], caches[1], step)
        for i in range(self.config.layers):
            variables = self.add_variable_inputs(f"layer{i}", facts)
            info = block.bind(variables).call_with_info(x, *caches[2 * i : 2 * i + 2], step)
            (x,) = info.outputs
        logits = self.head(self.norm(x))
        return [ops.cast(ops.argmax(logits, dim=-1), popxl.int32), *caches]


class Generator:
    def __init__(self, config: Config):
        c = self.config = config
        ir = self.ir = popxl.Ir()
        with ir.main_graph, popxl.in_sequence():
            prompt_stream = popxl.h2d_stream((c.prompt, c.batch), popxl.int32, "prompt")
            out_stream = popxl.d2h_stream((c.length, c.batch), popxl.int32, "words")
            self.streams = prompt_stream, out_stream
            prompt = ops.host_load(prompt_stream)
            words = ops.concat([prompt, ops.init((c.new, c.batch), popxl.int32)], axis=0)
            cache = popxl.TensorSpec((c.batch, c.heads, c.length, c.size), popxl.float32)
            caches = [ops.init(*cache.to_tuple()) for _ in range(2 * c.layers)]
            token = popxl.TensorSpec((c.batch,), popxl.int32)
            step = popxl.constant(0, popxl.int32)
            facts, self.model = Llama(c).create_graph(token, step, caches)
            self.variables = facts.init()
            weights = self.variables.values_flat()
            graph = ir.create_graph(self.one_token, words, step, caches, weights)
            words, *_ = ops.repeat(graph, c.length - 1, words, step, *caches, *weights)
            ops.host_store(out_stream, words)

    def one_token(
        self,
        words: popxl.Tensor,
        step: popxl.Tensor,
        caches: list[popxl.Tensor],
        weights: list[popxl.Tensor],
    ):
        """Read the token at `step`; write the one behind it, unless it is of the prompt."""
        c = self.config
        token = ops.dynamic_slice(words, step, [0], [1], True).reshape((c.batch,))
        named = NamedTensors.pack(self.variables.keys_flat(), weights)
        chosen, *caches = self.model.bind(named).call(token, step, *caches)
        following = step + 1
        old = ops.dynamic_slice(words, following, [0], [1], True)
        is_new = ops.greater(following, popxl.constant(c.prompt - 1, popxl.int32))
        row = ops.where(is_new, chosen.reshape((1, c.batch)), old)
        words = ops.dynamic_update(words, following, row, [0], [1], True)
        return [words, following, *caches]

    def weights(self, hf) -> addons.WeightsDict:
        """Returns the weights of a `transformers.LlamaForCausalLM`."""
        v, out = self.variables, addons.WeightsDict()
        out[v.embedding.weight] = to_numpy(hf.model.embed_tokens.weight)
        out[v.norm.weight] = to_numpy(hf.model.norm.weight)
        out.update(Linear.torch_mapping(v.head, hf.lm_head))
        for i, layer in enumerate(hf.model.layers):
            ours = v.get(f"layer{i}")
            for name, theirs in (("ln_1", layer.input_layernorm),
                                 ("ln_2", layer.post_attention_layernorm)):  # fmt: skip
                out[ours.get(name).weight] = to_numpy(theirs.weight)
            for name, theirs in (("gate", layer.mlp.gate_proj), ("up", layer.mlp.up_proj),
                                 ("down", layer.mlp.down_proj)):  # fmt: skip
                out.update(Linear.torch_mapping(ours.get(name), theirs))
            for name in "qkvo":
                theirs = getattr(layer.self_attn, f"{name}_proj")
                out.update(Linear.torch_mapping(ours.attention.get(name), theirs))
        return out

    def generate(self, hf, prompts: np.ndarray) -> np.ndarray:
        """Prompts (batch, prompt) -> (batch, length)."""
        prompt_stream, out_stream = self.streams
        with popxl.Session(self.ir, "ipu_model") as session:
            session.write_variables_data(self.weights(hf))
            return session.run({prompt_stream: prompts.T.astype(np.int32)})[out_stream].T
