"""Relative positions against Hugging Face's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.models.t5.modeling_t5 import T5Attention as HFAttention

import popxl
import popxl_addons as addons
from config.t5 import T5Config
from modelling.layers import MASK_VALUE
from modelling.t5.relative_position import RelativePositionBias, relative_position_bucket
from tests.modelling.standalone_modules import StandaloneModule


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("buckets", "max_distance"), [(32, 128), (32, 64), (32, 1000), (8, 9), (64, 300)]
)
def test_buckets_are_hugging_faces(causal, buckets, max_distance):
    distance = np.arange(-2000, 2001)
    theirs = HFAttention._relative_position_bucket(
        torch.tensor(distance), not causal, buckets, max_distance
    )
    np.testing.assert_array_equal(
        relative_position_bucket(distance, causal, buckets, max_distance), theirs.numpy()
    )


@pytest.mark.parametrize("causal", [False, True])
def test_biases_are_those_of_each_pairs_bucket(causal):
    """All at once, for more queries than keys and the other way round."""
    attention = {"heads": 3, "relative_attention_num_buckets": 8}
    attention |= {"relative_attention_max_distance": 9}
    config = T5Config.from_dict({"model": {"attention": attention}})
    sizes = [(4, 4), (5, 3), (3, 5), (1, 6), (6, 1)]
    weight = np.random.default_rng(0).standard_normal((8, 3)).astype(np.float32)
    ir = popxl.Ir()
    with ir.main_graph:
        module = StandaloneModule(config, lambda: RelativePositionBias(causal))
        variable = popxl.variable(weight)
        streams = {}
        for size in sizes:
            _, graph = module.create_graph(*size)
            streams[size] = addons.host_store(*graph.bind(_named(graph, variable)).call())
    with popxl.Session(ir, "cpu") as session:
        stored = session.run()
    for size, stream in streams.items():
        np.testing.assert_array_equal(stored[stream], expected(weight, causal, *size))


def _named(graph: addons.GraphWithNamedArgs, t: popxl.Tensor) -> addons.NamedTensors:
    (name,) = graph.args.keys_flat()
    return addons.NamedTensors.from_dict({name: t})


def expected(weight: np.ndarray, causal: bool, queries: int, keys: int) -> np.ndarray:
    distance = torch.arange(keys)[None] - torch.arange(queries)[:, None]
    buckets = HFAttention._relative_position_bucket(distance, not causal, 8, 9).numpy()
    bias = weight[buckets].transpose(2, 0, 1)
    hidden = causal & (distance.numpy() > 0)
    return (bias + np.where(hidden, MASK_VALUE, 0).astype(np.float32))[None]
