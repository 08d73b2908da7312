"""Layers against torch."""

import numpy as np
import pytest
import torch

import popxl
from popxl_addons.layers import Embedding, LayerNorm, Linear
from popxl_addons.ops.replicated_all_reduce_TP import replicated_all_reduce_identical_grad_inputs
from popxl_addons.testing_utils import TensorInput, run_module
from tests.popxl_addons.helpers import replicas_run

rng = np.random.default_rng(0)


@pytest.mark.parametrize("bias", [True, False])
def test_linear(bias):
    layer = torch.nn.Linear(3, 4, bias=bias)
    x = rng.normal(size=(2, 5, 3)).astype(np.float32)
    (y,) = run_module(
        Linear(4, bias), TensorInput(x), weights=lambda v: Linear.torch_mapping(v, layer)
    )
    wanted = layer(torch.tensor(x)).detach().numpy()
    np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-6)


def test_layer_norm():
    layer = torch.nn.LayerNorm(6)
    torch.nn.init.normal_(layer.weight)
    torch.nn.init.normal_(layer.bias)
    x = rng.normal(3, 2, size=(2, 5, 6)).astype(np.float32)
    (y,) = run_module(
        LayerNorm(), TensorInput(x), weights=lambda v: LayerNorm.torch_mapping(v, layer)
    )
    wanted = layer(torch.tensor(x)).detach().numpy()
    np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("axis", [0, 1])
def test_embedding(axis):
    table = rng.normal(size=(16, 3)).astype(np.float32)
    indices = np.array([[1, 6], [0, 1]], np.int32)
    (y,) = run_module(
        Embedding(popxl.float32, 7, 3, axis),  # rows 7 to 15 are padding
        TensorInput(indices),
        weights=lambda v: {v.weight: table if axis == 0 else table.T},
    )
    wanted = table[indices] if axis == 0 else np.take(table.T, indices, axis=1)
    np.testing.assert_array_equal(y, wanted)


@pytest.mark.parametrize(
    ("vocabulary", "shards", "size"),
    [(10, 1, 16), (16, 1, 16), (17, 1, 32), (33, 2, 32), (65, 4, 32)],
)
def test_shards_of_a_vocabulary_are_whole_multislices(vocabulary, shards, size):
    assert Embedding.get_vocab_shard_size(vocabulary, shards) == size
    offsets = Embedding.get_offsets(vocabulary, shards)
    assert offsets.tolist() == [size * i for i in range(shards)]
    with popxl.Ir(replication=shards).main_graph:
        alone = popxl.gir().replica_grouping(group_size=1)
        layer = Embedding(popxl.float32, vocabulary, 3, replica_grouping=alone)
        factories, _ = layer.create_graph(popxl.TensorSpec((2,), popxl.int32))
        assert factories.weight.shape == (size, 3)


@pytest.mark.parametrize("shards", [2, 4])
def test_embedding_with_a_vocabulary_cut_over_replicas(shards):
    vocabulary, hidden = 50, 3
    table = rng.normal(size=(vocabulary, hidden)).astype(np.float32)
    words = rng.integers(0, vocabulary, size=(6,))
    size = Embedding.get_vocab_shard_size(vocabulary, shards)
    padded = np.zeros((size * shards, hidden), np.float32)
    padded[:vocabulary] = table
    offsets = Embedding.get_offsets(vocabulary, shards)

    def build(indices):
        ir = popxl.gir()
        alone = ir.replica_grouping(group_size=1)
        module = Embedding(popxl.float32, vocabulary, hidden, replica_grouping=alone)
        factories, graph = module.create_graph(indices)
        parts = padded.reshape(shards, size, hidden)
        factories.weight.data_iter = iter(parts)  # one item for each group
        (part,) = graph.bind(factories.init()).call(indices)
        return [replicated_all_reduce_identical_grad_inputs(part)]

    local = (words[None] - offsets[:, None]).astype(np.int32)
    (y,) = replicas_run(shards, build, {"indices": local})
    for replica in range(shards):
        np.testing.assert_array_equal(y[replica], table[words])
