"""BERT on SQuAD by phased execution: fine-tuning with weights, state and activations in remote
buffers, cut over the replicas of data parallelism."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

import popxl
import popxl_addons as addons
from examples.runs import run_from_weights
from popxl import ops
from popxl.utils import to_numpy
from popxl_addons import NamedTensors
from popxl_addons.array_munging import pad_axis
from popxl_addons.layers import Embedding, LayerNorm, Linear
from popxl_addons.named_replica_grouping import get_ild_replica_grouping
from popxl_addons.remote import load_remote_graph, named_variable_buffers, store_remote_graph
from popxl_addons.rts import (
    all_gather_replica_sharded_graph,
    reduce_replica_sharded_graph,
    replica_sharded_spec,
)
from popxl_addons.transforms.batch_serialisation import (
    RemoteHandle,
    batch_serial_buffer,
    batch_serialise,
    batch_serialise_fwd_and_grad,
)


@dataclass(frozen=True)
class Config:
    replicas: int = 2
    micro_batches: int = 2
    batch: int = 2
    sequence: int = 6
    vocab: int = 40
    hidden: int = 16
    heads: int = 2
    layers: int = 2
    eps: float = 1e-12
    lr: float = 0.05


# ---- layers -------------------------------------------------------------------------------------
class Embeddings(addons.Module):
    def __init__(self, config: Config):
        super().__init__()
        c = self.config = config
        self.word = Embedding(popxl.float32, c.vocab, c.hidden)
        self.token_type = Embedding(popxl.float32, 2, c.hidden)
        self.position = Embedding(popxl.float32, c.sequence, c.hidden)
        self.norm = LayerNorm()

    def build(self, words: popxl.Tensor, token_type: popxl.Tensor) -> popxl.Tensor:
        positions = popxl.constant(np.arange(self.config.sequence), popxl.int32)
        x = self.word(words) + self.token_type(token_type) + self.position(positions)
        return self.norm(x, eps=self.config.eps)


class SelfAttention(addons.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.qkv = Linear(3 * config.hidden)
        self.output = Linear(config.hidden)

    def build(self, x: popxl.Tensor, mask: popxl.Tensor) -> popxl.Tensor:
        c = self.config
        q, k, v = (self.heads(t) for t in ops.split(self.qkv(x), 3, axis=-1))
        scores = q @ k.transpose((0, 1, 3, 2)) * (c.hidden // c.heads) ** -0.5
        bias = (ops.cast(mask, popxl.float32) - 1.0) * 1e4
        probs = ops.softmax(scores + bias.reshape((c.batch, 1, 1, c.sequence)), axis=-1)
        z = (probs @ v).transpose((0, 2, 1, 3))
        return self.output(z.reshape(x.shape))

    def heads(self, t: popxl.Tensor) -> popxl.Tensor:
        c = self.config
        t = t.reshape((c.batch, c.sequence, c.heads, c.hidden // c.heads))
        return t.transpose((0, 2, 1, 3))


class Layer(addons.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.eps = config.eps
        self.attention = SelfAttention(config)
        self.norm1 = LayerNorm()
        self.intermediate = Linear(4 * config.hidden)
        self.output = Linear(config.hidden)
        self.norm2 = LayerNorm()

    def build(self, x: popxl.Tensor, mask: popxl.Tensor) -> popxl.Tensor:
        x = self.norm1(x + self.attention(x, mask), eps=self.eps)
        return self.norm2(x + self.output(ops.gelu(self.intermediate(x))), eps=self.eps)


class SquadHead(addons.Module):
    """Loss of the start and end positions: their mean cross entropies, averaged."""

    def __init__(self):
        super().__init__()
        self.span = Linear(2)

    def build(self, x: popxl.Tensor, start: popxl.Tensor, end: popxl.Tensor) -> popxl.Tensor:
        logits = self.span(x)
        losses = [
            addons.cross_entropy(ops.squeeze(part, [-1]), at)
            for part, at in zip(ops.split(logits, 2, axis=-1), (start, end), strict=True)
        ]
        return (losses[0] + losses[1]) * 0.5


def encoder_weights(
    embeddings: NamedTensors, layers: Iterable[NamedTensors], bert
) -> addons.WeightsDict:
    """Returns the weights of a `transformers.BertModel`."""
    out, tables = addons.WeightsDict(), bert.embeddings
    for name in ("word", "token_type", "position"):
        t = embeddings.get(name).weight
        table = to_numpy(getattr(tables, f"{name}_embeddings").weight)
        out[t] = pad_axis(table, t.shape_on_host[0], 0)
    out.update(LayerNorm.torch_mapping(embeddings.norm, tables.LayerNorm))
    for v, layer in zip(layers, bert.encoder.layer, strict=True):
        own = layer.attention.self
        parts = (own.query, own.key, own.value)
        out[v.attention.qkv.weight] = np.hstack([to_numpy(p.weight).T for p in parts])
        out[v.attention.qkv.bias] = np.hstack([to_numpy(p.bias) for p in parts])
        out.update(Linear.torch_mapping(v.attention.output, layer.attention.output.dense))
        out.update(LayerNorm.torch_mapping(v.norm1, layer.attention.output.LayerNorm))
        out.update(Linear.torch_mapping(v.intermediate, layer.intermediate.dense))
        out.update(Linear.torch_mapping(v.output, layer.output.dense))
        out.update(LayerNorm.torch_mapping(v.norm2, layer.output.LayerNorm))
    return out


# ---- phases -------------------------------------------------------------------------------------
class Phase:
    """Variables of a layer in remote buffers, and what brings them to the device and back."""

    def __init__(self, facts, graph, entries: int):
        self.facts, self.graph = facts, graph
        self.buffers = named_variable_buffers(facts, entries)
        self.variables = [self.facts.init_remote(self.buffers, i) for i in range(entries)]
        self.load, self.names = load_remote_graph(self.buffers, entries)
        self.store = store_remote_graph(self.buffers, entries)
        shards = NamedTensors.pack(self.names, self.load.graph.outputs)
        self.gather, self.gathered = all_gather_replica_sharded_graph(
            shards, use_io_tiles=True, replica_groups=facts.replica_groupings
        )

    def accumulate(self, grads_required=()):
        self.grad_facts, grad = addons.autodiff_with_accumulation(
            self.graph,
            self.graph.args.tensors,
            grads_required=grads_required,
            replica_groupings=self.facts.replica_groupings,
        )
        self.reduce, self.reduced = reduce_replica_sharded_graph(
            NamedTensors(accum=self.graph.args),
            "mean",
            shard_groups=addons.NamedReplicaGrouping(
                accum=self.facts.replica_groupings.map(get_ild_replica_grouping)
            ),
            replica_group=popxl.gcg().ir.replica_grouping(),
        )
        for t, out in zip(self.graph.args.tensors, self.reduce.graph.outputs, strict=True):
            spec = replica_sharded_spec(t, popxl.gcg().ir.replica_grouping())
            assert out.shape == spec.shape
        return grad

    def shards(self, i):
        return NamedTensors.pack(self.names, self.load.call(i))

    def whole(self, shards):
        return NamedTensors.pack(self.gathered, self.gather.bind(shards).call())

    def update(self, i, shards, accumulators, lr: float):
        """Reduce the gradients to shards, and make a step of gradient descent."""
        grads = NamedTensors.pack(self.reduced, self.reduce.bind(accumulators).call())
        for name, shard in shards.to_dict().items():
            ops.scaled_add_(shard, grads.accum.get(name), b=-lr)
        self.store.bind(shards).call(i)


class SquadModel:
    def __init__(self, config: Config):
        c = self.config = config
        self.ir = popxl.Ir(replication=c.replicas)
        self.ir.num_host_transfers = c.micro_batches
        ints = ((c.batch, c.sequence), popxl.int32)
        with self.ir.main_graph, popxl.in_sequence():
            self.inputs = addons.InputStreams(
                words=ints, token_type=ints, mask=ints,
                start=((c.batch,), popxl.int32), end=((c.batch,), popxl.int32),
            )  # fmt: skip
            self.outputs = addons.OutputStreams(loss=((), popxl.float32))
            self.build_phases()
            self.mask_in.graph.call(0)
            self.forward()
            self.backward()

    def build_phases(self):
        c, s = self.config, self.inputs
        hidden = popxl.TensorSpec((c.batch, c.sequence, c.hidden), popxl.float32)
        self.embeddings = Phase(*Embeddings(c).create_graph(s.words.spec, s.token_type.spec), 1)
        self.layer = Phase(*Layer(c).create_graph(hidden, s.mask.spec), c.layers)
        self.head = Phase(*SquadHead().create_graph(hidden, s.start.spec, s.end.spec), 1)
        x, mask = self.layer.graph.graph.inputs[:2]
        x_buffer, dx_buffer = (
            batch_serial_buffer(x, c.micro_batches, c.layers + 1) for _ in range(2)
        )
        mask_buffer = batch_serial_buffer(mask, c.micro_batches)
        # The mask is loaded from the host once, and by every layer from its buffer.
        copy = addons.GraphWithNamedArgs(self.ir.create_graph(lambda m: m + 0, s.mask.spec))
        self.mask_in = batch_serialise(
            copy, c.micro_batches, {copy.graph.inputs[0]: s.mask}, {},
            {copy.graph.outputs[0]: (mask_buffer, None)}, io_mode="compute",
        )  # fmt: skip
        words, types = self.embeddings.graph.graph.inputs[:2]
        grad = addons.recompute_graph(self.embeddings.accumulate())
        self.embeddings_fwd, self.embeddings_bwd = batch_serialise_fwd_and_grad(
            self.embeddings.graph, grad, self.embeddings.graph.args, c.micro_batches,
            load_handles={words: s.words, types: s.token_type,
                          grad.graph.inputs[0]: (dx_buffer, 0)},
            store_streams={},
            store_buffers={self.embeddings.graph.graph.outputs[0]: (x_buffer, 0)},
        )  # fmt: skip
        grad = addons.recompute_graph(self.layer.accumulate([x]))
        self.layer_fwd, self.layer_bwd = batch_serialise_fwd_and_grad(
            self.layer.graph, grad, self.layer.graph.args, c.micro_batches, rows=c.layers,
            load_handles={x: (x_buffer, 0), mask: (mask_buffer, None),
                          grad.graph.inputs[0]: (dx_buffer, 1)},
            store_streams={},
            store_buffers={self.layer.graph.graph.outputs[0]: (x_buffer, 1),
                           grad.graph.outputs[0]: (dx_buffer, 0)},
        )  # fmt: skip
        top = self.head.graph.graph.inputs[0]
        both = self.loss_and_gradient(self.head.accumulate([top]))
        loss, dx = both.graph.outputs
        top, start, end = both.graph.inputs[:3]
        self.head_both = batch_serialise(
            both, c.micro_batches,
            load_handles={top: RemoteHandle(x_buffer, c.layers), start: s.start, end: s.end},
            store_streams={loss: self.outputs.loss},
            store_buffers={dx: RemoteHandle(dx_buffer, c.layers)},
        )  # fmt: skip

    def loss_and_gradient(self, grad: addons.GraphWithNamedArgs) -> addons.GraphWithNamedArgs:
        """The head's graph and its gradient as one graph, with the arguments of both."""
        fwd, args = self.head.graph, NamedTensors()

        def build(*inputs: popxl.Tensor):
            for source in (fwd.args, grad.args):
                for name, t in source.to_dict().items():
                    by_ref = source is grad.args
                    args.insert(name, popxl.graph_input(t.shape, t.dtype, by_ref=by_ref), True)
            info = fwd.bind(args).call_with_info(*inputs)
            values = grad.grad_graph_info.inputs_dict(info)
            dx = grad.bind(args).call(popxl.constant(1.0), args=values)
            return [info.outputs[0], *dx]

        graph = self.ir.create_graph(build, *(t.spec for t in fwd.graph.inputs[:3]))
        return addons.GraphWithNamedArgs(graph, args)

    def forward(self):
        self.embeddings_fwd.graph.bind(self.embeddings.whole(self.embeddings.shards(0))).call(0)

        def one_layer(i: popxl.Tensor):
            self.layer_fwd.graph.bind(self.layer.whole(self.layer.shards(i))).call(i)
            return i + 1

        i = popxl.constant(0, popxl.int32)
        ops.repeat(self.ir.create_graph(one_layer, i), self.config.layers, i)

    def backward(self):
        self.train(self.head, self.head_both, popxl.constant(0, popxl.int32))

        def one_layer(i: popxl.Tensor):
            self.train(self.layer, self.layer_bwd, i)
            return i - 1

        i = popxl.constant(self.config.layers - 1, popxl.int32)
        ops.repeat(self.ir.create_graph(one_layer, i), self.config.layers, i)
        self.train(self.embeddings, self.embeddings_bwd, popxl.constant(0, popxl.int32))

    def train(self, phase: Phase, serial, i: popxl.Tensor):
        shards = phase.shards(i)
        accumulators = phase.grad_facts.init_zero()
        values = phase.whole(shards)
        values.update(accumulators)
        serial.graph.bind(values).call(i)
        phase.update(i, shards, accumulators, self.config.lr)

    # ---- weights --------------------------------------------------------------------------------
    def weights(self, hf) -> addons.WeightsDict:
        """Returns the weights of a `transformers.BertForQuestionAnswering`."""
        out = encoder_weights(self.embeddings.variables[0], self.layer.variables, hf.bert)
        out.update(Linear.torch_mapping(self.head.variables[0].span, hf.qa_outputs))
        return out

    def fine_tune(self, hf, steps: list[dict[str, np.ndarray]]):
        """Train from the weights of `hf`, one optimizer step for each batch.

        Returns:
            Losses (steps, micro_batches, replicas); the variables' data.
        """
        feeds = ({stream: batch[n] for n, stream in self.inputs.items()} for batch in steps)
        outputs, trained = run_from_weights(self.ir, "ipu_hw", self.weights(hf), feeds)
        return np.stack([out[self.outputs.loss] for out in outputs]), trained
