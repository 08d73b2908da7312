"""GPT-2 with tensor parallelism in two dimensions.

Replicas form a grid of tp1 x tp2. Activations are cut over the features: each of the tp1 groups of
neighbours has whole layers' inputs in tp1 parts, and each weight is cut along its inputs over one
dimension and along its outputs over the other. So a product is partial over one dimension, and its
result is cut over the other; the next product goes back.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import popxl
import popxl_addons as addons
from examples.runs import run_from_weights
from popxl import ops
from popxl.utils import to_numpy
from popxl_addons.array_munging import pad_axis, shard, shard2D
from popxl_addons.layers import Embedding, Linear
from popxl_addons.layers.layer_norm_distributed import LayerNormDistributed
from popxl_addons.ops.cross_entropy_sharded_loss import cross_entropy_sharded_loss
from popxl_addons.ops.replicated_all_reduce_TP import (
    replicated_all_reduce_identical_grad_inputs,
    replicated_all_reduce_identical_inputs,
)
from popxl_addons.patterns import apply_pre_alias_patterns


@dataclass(frozen=True)
class Config:
    tp1: int = 2
    tp2: int = 2
    batch: int = 2
    sequence: int = 5
    vocab: int = 50
    hidden: int = 16
    heads: int = 4
    layers: int = 2
    eps: float = 1e-5

    @property
    def replicas(self) -> int:
        return self.tp1 * self.tp2

    def groups(self):
        """Replicas along the first and along the second dimension."""
        ir = popxl.gcg().ir
        rg1 = ir.replica_grouping(stride=1, group_size=self.tp1)
        rg2 = ir.replica_grouping(stride=self.tp1, group_size=self.tp2)
        return rg1, rg2


class Linear2D(addons.Module):
    """Linear layer: x sharded over `inputs` -> y sharded over `outputs`."""

    def __init__(self, features: int, inputs: popxl.ReplicaGrouping, outputs):
        super().__init__()
        self.inputs, self.outputs = inputs, outputs
        alone = popxl.gcg().ir.replica_grouping(group_size=1)
        self.weight = Linear(features // outputs.group_size, bias=False, replica_grouping=alone)

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        x = replicated_all_reduce_identical_inputs(x, group=self.outputs)
        y = self.weight(x)
        y = replicated_all_reduce_identical_grad_inputs(y, group=self.inputs)
        b = self.add_variable_input(
            "bias", lambda: np.zeros(y.shape[-1]), y.dtype,
            replica_grouping=self.outputs.transpose(),
        )  # fmt: skip
        return y + b


class Attention(addons.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        rg1, rg2 = config.groups()
        self.heads = config.heads // config.tp2
        self.qkv = Linear2D(3 * config.hidden, rg1, rg2)
        self.output = Linear2D(config.hidden, rg2, rg1)

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        c = self.config
        size = c.hidden // c.heads

        def split(t: popxl.Tensor) -> popxl.Tensor:
            return t.reshape((c.batch, c.sequence, self.heads, size)).transpose((0, 2, 1, 3))

        q, k, v = map(split, ops.split(self.qkv(x), 3, axis=-1))
        mask = popxl.constant(np.triu(np.full((c.sequence, c.sequence), -1e4), 1), x.dtype)
        scores = q @ k.transpose((0, 1, 3, 2)) * size**-0.5 + mask
        z = (ops.softmax(scores, axis=-1) @ v).transpose((0, 2, 1, 3))
        return self.output(z.reshape((c.batch, c.sequence, self.heads * size)))


class Block(addons.Module):
    def __init__(self, config: Config):
        super().__init__()
        rg1, rg2 = config.groups()
        self.eps = config.eps
        self.ln_1 = LayerNormDistributed(replica_grouping=rg1)
        self.attention = Attention(config)
        self.ln_2 = LayerNormDistributed(replica_grouping=rg1)
        self.up = Linear2D(4 * config.hidden, rg1, rg2)
        self.down = Linear2D(config.hidden, rg2, rg1)

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        x = x + self.attention(self.ln_1(x, eps=self.eps))
        return x + self.down(ops.gelu(self.up(self.ln_2(x, eps=self.eps))))


class GPT(addons.Module):
    """Logits of a vocabulary shard; the vocabulary is sharded over the second dimension."""

    def __init__(self, config: Config):
        super().__init__()
        c = self.config = config
        rg1, rg2 = c.groups()
        self.rg1, self.rg2 = rg1, rg2
        alone = popxl.gcg().ir.replica_grouping(group_size=1)
        self.rows = Embedding.get_vocab_shard_size(c.vocab, c.tp2)
        self.words = alone
        self.positions = Embedding(
            popxl.float32, c.sequence, c.hidden // c.tp1, replica_grouping=rg1.transpose()
        )
        # Its replica groups cut the features here, and not the vocabulary.
        self.positions.n_shards = 1
        self.positions.vocab_shard_size = Embedding.get_vocab_shard_size(c.sequence, 1)
        self.layers = addons.Module.from_list([Block(c) for _ in range(c.layers)])
        self.ln_f = LayerNormDistributed(replica_grouping=rg1)

    def build(self, words: popxl.Tensor) -> popxl.Tensor:
        """words: token ids minus the first id of this replica's vocabulary shard."""
        c = self.config
        table = self.add_variable_input(
            "wte", lambda: np.zeros((self.rows, c.hidden // c.tp1)), popxl.float32,
            replica_grouping=self.words,
        )  # fmt: skip
        x = ops.gather(table, words, axis=0, zero_OOR=True)
        x = replicated_all_reduce_identical_grad_inputs(x, group=self.rg2)
        x = x + self.positions(popxl.constant(np.arange(c.sequence), popxl.int32))
        for layer in self.layers:
            x = layer(x)
        x = replicated_all_reduce_identical_inputs(self.ln_f(x, eps=c.eps), group=self.rg2)
        return replicated_all_reduce_identical_grad_inputs(x @ table.T, group=self.rg1)


class Loss(addons.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.gpt, self.config = GPT(config), config

    def build(self, words: popxl.Tensor, labels: popxl.Tensor) -> popxl.Tensor:
        """labels: like words; those of other shards and of padding are out of range."""
        logits = self.gpt(words)
        c = self.config
        logits = logits.reshape((c.batch * c.sequence, logits.shape[-1]))
        bound = self.add_variable_input(
            "padding", lambda: np.zeros(logits.shape[-1]), logits.dtype,
            replica_grouping=self.gpt.rg2.transpose(),
        )  # fmt: skip
        return cross_entropy_sharded_loss(
            logits + bound, labels.flatten(), replica_grouping=self.gpt.rg2
        )


class Program:
    def __init__(self, config: Config):
        c = self.config = config
        ir = self.ir = popxl.Ir(replication=c.replicas)
        with ir.main_graph:
            ints = ((c.batch, c.sequence), popxl.int32)
            self.inputs = addons.InputStreams(words=ints, labels=ints)
            words, labels = (ops.host_load(s) for s in self.inputs)
            facts, fwd = Loss(c).create_graph(words, labels)
            self.variables = facts.init()
            grad = addons.autodiff(fwd, grads_required=fwd.args.values_flat())
            info = fwd.bind(self.variables).call_with_info(words, labels)
            (loss,) = info.outputs[:1]
            grads = grad.call(popxl.constant(1.0), args=grad.grad_graph_info.inputs_dict(info))
            self.loss = addons.host_store(loss)
            names = fwd.args.keys_flat()
            self.grads = {n: addons.host_store(g) for n, g in zip(names, grads, strict=True)}
        apply_pre_alias_patterns(ir)

    def offsets(self, data: np.ndarray) -> np.ndarray:
        """Returns token ids minus the first id of each replica's vocabulary shard."""
        c = self.config
        first = Embedding.get_offsets(c.vocab, c.tp2)
        views = [data - first[r // c.tp1] for r in range(c.replicas)]
        return np.stack(views).astype(np.int32)

    def weights(self, hf) -> dict[str, np.ndarray]:
        """Returns the host weights of a `transformers.GPT2LMHeadModel` by our names."""
        c, gpt, out = self.config, hf.transformer, {}
        rows = Embedding.get_vocab_shard_size(c.vocab, c.tp2)
        table = pad_axis(to_numpy(gpt.wte.weight), rows * c.tp2, 0)
        out["gpt.wte"] = shard2D(table, c.tp2, c.tp1, 0, 1)
        padded = pad_axis(np.zeros(c.vocab), rows * c.tp2, 0, -1e4)
        out["padding"] = shard(padded, c.tp2, 0)
        positions = pad_axis(
            to_numpy(gpt.wpe.weight), Embedding.get_vocab_shard_size(c.sequence, 1), 0
        )
        out["gpt.positions.weight"] = shard(positions, c.tp1, 1)
        out.update(self.norm("gpt.ln_f", gpt.ln_f))
        for i, block in enumerate(gpt.h):
            name = f"gpt.layers.{i}"
            out.update(self.norm(f"{name}.ln_1", block.ln_1))
            out.update(self.norm(f"{name}.ln_2", block.ln_2))
            out.update(self.linear(f"{name}.attention.qkv", block.attn.c_attn, up=True, parts=3))
            out.update(self.linear(f"{name}.attention.output", block.attn.c_proj, up=False))
            out.update(self.linear(f"{name}.up", block.mlp.c_fc, up=True))
            out.update(self.linear(f"{name}.down", block.mlp.c_proj, up=False))
        return out

    def norm(self, name: str, layer) -> dict[str, np.ndarray]:
        return {
            f"{name}.{n}": shard(to_numpy(getattr(layer, n)), self.config.tp1, 0)
            for n in ("weight", "bias")
        }

    def linear(self, name: str, layer, up: bool, parts: int = 1) -> dict[str, np.ndarray]:
        """HF's Conv1D has weights (inputs, outputs). Replica r is at (r // tp1, r % tp1)."""
        c = self.config
        w, b = to_numpy(layer.weight), to_numpy(layer.bias)
        if up:  # inputs over the first dimension, outputs over the second
            w = by_part(w, parts, c.tp2)
            b = by_part(b[None], parts, c.tp2)[0]
            return {
                f"{name}.weight.weight": shard2D(w, c.tp2, c.tp1, 1, 0),
                f"{name}.bias": shard(b, c.tp2, 0),
            }
        return {
            f"{name}.weight.weight": shard2D(w, c.tp2, c.tp1, 0, 1),
            f"{name}.bias": shard(b, c.tp1, 0),
        }

    def run(self, hf, words: np.ndarray, labels: np.ndarray):
        """Loss of each replica, and gradients as variables' host data."""
        data = self.weights(hf)
        variables = self.variables.to_dict()
        weights = {variables[n]: a for n, a in data.items()}
        feed = {self.inputs.words: self.offsets(words), self.inputs.labels: self.offsets(labels)}
        (out,), _ = run_from_weights(self.ir, "ipu_model", weights, [feed])
        grads = {}
        for name, stream in self.grads.items():
            groups = variables[name].replica_grouping.groups
            grads[name] = np.stack([out[stream][g[0]] for g in groups])
        return out[self.loss], grads, data


def by_part(w: np.ndarray, parts: int, shards: int) -> np.ndarray:
    """Reorder columns (parts, features) so that a shard has its share of each part."""
    pieces = [np.split(p, shards, -1) for p in np.split(w, parts, -1)]
    return np.concatenate([p[s] for s in range(shards) for p in pieces], -1)
