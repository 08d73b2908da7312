"""Half types: what is computed in float32, and what would overflow in float16."""

from __future__ import annotations

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from modelling.decoder import HEAD
from modelling.layers import add_residual
from modelling.layers.block_context import FLOAT16_LIMIT
from tests.modelling.harness import small_config
from tests.modelling.layers.t5_feed_forward import feed_forward
from tests.modelling.standalone_modules import decoder_block, encoder_block, t5_head
from tests.modelling.weight_maps import base_weight_map


def run(ir: popxl.Ir, streams: list[popxl.DeviceToHostStream]) -> list[np.ndarray]:
    with popxl.Session(ir, "cpu") as session:
        out = session.run()
    return [out[s].astype(np.float32) for s in streams]


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_blocks_in_half_types_are_near_float32(precision):
    outputs = {p: blocks(p) for p in ("float32", precision)}
    tolerance = {"float16": 4e-3, "bfloat16": 3e-2}[precision]  # a few of their roundings
    for half, single in zip(outputs[precision], outputs["float32"], strict=True):
        assert np.abs(half - single).max() < tolerance * np.abs(single).max()


def blocks(precision: str) -> list[np.ndarray]:
    """An encoder layer, a decoder layer on it, and the loss."""
    config = small_config(precision=precision)
    weight_map = base_weight_map(config)
    logical = weight_map.init_weights(0)
    dtype = popxl.dtype.as_dtype(precision)
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 40, (2, 4), np.int32)
    ir = popxl.Ir()
    with ir.main_graph:

        def call(module: addons.Module, layer: str, *inputs: popxl.Tensor) -> popxl.Tensor:
            facts, graph = module.create_graph(*(t.spec for t in inputs))
            data = {row.path: row.to_variable_data(logical, 1) for row in weight_map.layers[layer]}
            assert data.keys() == set(facts.keys_flat())
            variables = addons.NamedTensors.from_dict(
                {n: popxl.variable(x, dtype) for n, x in data.items()}
            )
            (output,) = graph.bind(variables).call(*inputs)
            return output

        x, y = (popxl.variable(rng.standard_normal((2, n, 16)), dtype) for n in (12, 4))
        mask = popxl.variable(np.ones((2, 12), np.int32))
        encoded = call(encoder_block(config), "encoder.0", x, mask)
        decoded = call(decoder_block(config), "decoder.0", y, encoded, mask)
        weight = popxl.variable(np.float32(0.1))
        loss = call(t5_head(config), HEAD, decoded, popxl.variable(labels), weight)
        assert loss.dtype == popxl.float32
        streams = [addons.host_store(t) for t in (encoded, decoded, loss)]
    return run(ir, streams)


def test_a_residual_stays_finite_in_float16():
    ir = popxl.Ir()
    with ir.main_graph:
        x = popxl.variable(np.array([6e4, -6e4, 1.0]), popxl.float16)
        streams = [addons.host_store(add_residual(x, x))]
    (total,) = run(ir, streams)
    np.testing.assert_array_equal(total, np.array([FLOAT16_LIMIT, -FLOAT16_LIMIT, 2], np.float16))


def test_the_gradient_of_a_residual_needs_nothing_of_the_layer():
    """So that a float16 layer's last product and its collective are not computed again for it."""
    ir = popxl.Ir()
    spec = popxl.TensorSpec((3,), popxl.float16)
    layer = ir.create_graph(lambda x, w: add_residual(x, x * w), spec, spec)
    gradient = popxl.transforms.autodiff(layer)
    taken = popxl.transforms.ExpectedConnectionType.Fwd
    inputs = [c.fwd_tensor for c in gradient.expected_inputs if c.connection_type == taken]
    assert set(inputs) <= set(layer.inputs)


def test_the_scale_keeps_a_feed_forward_in_range():
    """Inner features of 300 × 300 are beyond float16, their part of the result is not."""
    out = []
    for scale in (1.0, 64.0):
        ir = popxl.Ir()
        with ir.main_graph:
            module = feed_forward(1, 1, scale, precision="float16")
            x = popxl.variable(np.array([[300.0]]), popxl.float16)
            _, graph = module.create_graph(x.spec)
            weights = {"wi_all.weight": [[1.0, 1.0]], "wo.weight": [[0.5]]}
            variables = {n: popxl.variable(w, popxl.float16) for n, w in weights.items()}
            named = addons.NamedTensors.from_dict(variables)
            streams = [addons.host_store(*graph.bind(named).call(x))]
        out += run(ir, streams)
    assert np.isinf(out[0]).all()
    np.testing.assert_allclose(out[1], [[45000.0]], rtol=1e-3)
