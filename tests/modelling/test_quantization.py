"""Weights in few bits: rounded as numpy rounds them, in any layout, in so much less memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from ml_dtypes import bfloat16

import popxl
from config.bart import BartConfig
from config.errors import ConfigError
from config.gptj import GPTJConfig
from config.model import QuantConfig
from config.presets import load_config
from config.sections import Model, RunConfig
from config.t5 import T5Config
from config.t5gemma import T5GemmaConfig
from modelling.layers import Linear
from modelling.quantization import QUANT_FIELDS, quantize_weight, quantized_shapes
from popxl import ops
from sessions.generation import GenerationSession
from tests.modelling.generation import gptj, t5
from tests.modelling.generation.harness import right_padded
from tests.modelling.gptj.hf import small_config
from tests.modelling.rounding import GROUP, is_quantized, rounded, rounded_weights
from tests.modelling.sessions import inference
from tests.modelling.standalone_modules import StandaloneModule
from tests.modelling.torch_training import logical
from tests.slow import slow

rng = np.random.default_rng(0)


def on_device(weight: np.ndarray, x: np.ndarray, dtype: type, bits: int) -> np.ndarray:
    """A linear layer's output, from its quantised weight."""
    ir = popxl.Ir()
    with ir.main_graph:
        t = popxl.variable(x.astype(dtype))
        model = {"eval": True, "precision": np.dtype(dtype).name, "hidden_size": weight.shape[0]}
        model |= {"quantization": f"int{bits}", "quantization_group_size": GROUP}
        config = RunConfig(family="none", model=Model(**model))
        layer = StandaloneModule(config, lambda: Linear(*weight.shape, shard="out", std=1.0))
        facts, graph = layer.create_graph(t)
        variables = facts.init(empty=True)
        (y,) = graph.bind(variables).call(t)
        out = popxl.d2h_stream(y.shape, y.dtype)
        ops.host_store(out, y)
    with popxl.Session(ir, "cpu") as session:
        parts = variables.weight
        data = zip(map(parts.get, QUANT_FIELDS), quantize_weight(weight, parts), strict=True)
        session.write_variables_data(dict(data))
        return session.run()[out]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("sd", [1.0, 1e-4, 1e-8])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, bfloat16])
def test_a_linear_layer_multiplies_by_the_rounded_weight(dtype, sd, bits):
    """The identity through the layer shows the weight itself."""
    weight = (sd * rng.normal(size=(24, 6))).astype(np.float32)
    kept, step = rounded(weight, bits=bits)
    error = np.abs(kept - weight.astype(np.float64))
    assert (error <= step / 2 * (1 + 1e-4)).all()
    assert error.max() > step.min() / 4
    found = on_device(weight, np.eye(24), dtype, bits)
    np.testing.assert_array_equal(found, kept.astype(dtype))


@pytest.mark.parametrize("bits", [4, 8])
def test_memory(bits):
    """So many bits a value, and a scale and a bias of 16 bits for each group of 64."""
    shapes = quantized_shapes((4096, 1024), QuantConfig(bits, 64))
    assert sum(2 * int(np.prod(s)) for s in shapes) == 4096 * 1024 * (bits + 32 / 64) / 8


@pytest.mark.parametrize(("features", "size", "bits"), [(24, 9, 4), (24, 6, 4), (24, 3, 8)])
def test_groups_must_divide_the_features(features, size, bits):
    with pytest.raises(ValueError, match=f"{features} input features .* groups of {size}"):
        quantized_shapes((features, 8), QuantConfig(bits, size))


# ---- whole models -------------------------------------------------------------------------------
def quantized_config(config: RunConfig, size: int, bits: int) -> RunConfig:
    model = replace(config.model, quantization=f"int{bits}", quantization_group_size=size)
    return replace(config, model=model)


def bytes_of(model: GenerationSession) -> int:
    """Bytes of the variables, all shards together."""
    return sum(
        v.nelms * v.dtype.as_numpy().itemsize * v.replica_grouping.num_groups
        for v in model.program.variables.tensors
    )


@pytest.mark.parametrize(
    ("family", "layout", "size", "bits"),
    [
        (gptj, (1, 4, 8), 8, 4),
        slow(t5, (1, 1, 8), 4, 8),
        slow(gptj, (1, 1, 16), 8, 4),
        slow(gptj, (1, 1, 16), 8, 8),
        slow(t5, (1, 1, 16), 4, 4),
    ],
)
def test_a_model_is_that_of_the_rounded_weights(family, layout, size, bits):
    """In few bits, it generates what it does from weights that numpy has rounded."""
    weights, config = logical(family.reference_model()), family.config_of(*layout)
    mask = right_padded(np.random.default_rng(3), config.model.sequence_length)[:16]
    input_ids = np.random.default_rng(4).integers(3, 40, mask.shape, np.int32) * mask
    with inference(config) as model:
        model.write(weights)
        exact = model.generate(input_ids, mask)
        model.write(rounded_weights(weights, size, bits))
        plain, before = model.generate(input_ids, mask), bytes_of(model)
    with inference(quantized_config(config, size, bits)) as model:
        model.write(weights)
        np.testing.assert_array_equal(model.generate(input_ids, mask), plain)
        after = bytes_of(model)
    if bits == 4:
        assert (plain != exact).any()  # rounding is seen
    count = sum(w.size for n, w in weights.items() if is_quantized(n, w))
    # So many bits for each value, and a scale and a bias of 16 bits for each group.
    assert before - after == count * (4 - bits / 8 - 4 / size)


def test_one_weight_at_a_time_is_decompressed():
    """Loops could compute what does not change once and for all: every weight, in full."""
    model = {"layers": 4, "hidden_size": 64, "quantization": "int4", "eval": True}
    config = small_config(micro_batch=1, **model, quantization_group_size=16)
    use = inference(config).session.memory_use()
    largest = 64 * 256 * 4  # bytes of the feed-forward's
    assert largest < use.temporaries < 4 * 12 * 64 * 64 * 4 / 4


# ---- configuration ------------------------------------------------------------------------------
INT4 = {"quantization": "int4"}
FAMILIES = [
    (T5Config, "tiny"),
    (GPTJConfig, "gptj_tiny"),
    (BartConfig, "bart_tiny"),
    (T5GemmaConfig, "t5gemma_tiny"),
]


@pytest.mark.parametrize(("family", "preset"), FAMILIES)
def test_a_group_must_divide_each_layers_features(family, preset):
    odd = {"model": INT4 | {"quantization_group_size": 24}}
    with pytest.raises(ConfigError, match=r"quantization_group_size 24 must be .* divides"):
        load_config(family, "inference", preset, odd)
    sharded = {"model": INT4, "execution": {"tensor_parallel": 8}}
    with pytest.raises(ConfigError, match=r"group_size 64 .* / execution\.tensor_parallel"):
        load_config(family, "inference", preset, sharded)


def test_quantised_weights_are_not_trained():
    with pytest.raises(ConfigError, match="int4 is for generation and adapters: weights in so few"):
        load_config(GPTJConfig, "finetuning", "gptj_tiny", {"model": INT4})
