"""Float8 scales and layer."""

import numpy as np
import pytest
import torch

import popxl
from popxl import ops
from popxl.fp8_utils import host_fp8_mse_scale, host_pow2scale_cast_to_fp8
from popxl_addons.layers import LinearFP8
from popxl_addons.ops import fp8_amax_scale
from popxl_addons.ops.fp8_mse_scale import fp8_mse_scale
from popxl_addons.ops.fp8_utils import float8_143_def, float8_152_def, fp8_def
from tests.popxl_addons.helpers import single_run
from tests.slow import slow

rng = np.random.default_rng(0)
FORMATS = [popxl.float8_143, popxl.float8_152]


def run_on_each(data, op, dtype):
    """What a program gives for arrays of one shape, one after the other."""
    ir = popxl.Ir()
    ir.num_host_transfers = len(data)
    with ir.main_graph:
        x = popxl.h2d_stream(data[0].shape, popxl.dtype.as_dtype(data[0].dtype))
        out = popxl.d2h_stream((), popxl.int32)
        step = ir.create_graph(lambda: ops.host_store(out, op(ops.host_load(x), dtype)))
        ops.repeat(step, len(data))
    with popxl.Session(ir) as session:
        return session.run({x: np.stack(data)})[out].tolist()


def is_nan(stored):
    return (stored.view(np.uint8) == 0x80).any()


@pytest.mark.parametrize("dtype", FORMATS)
def test_amax_scale_is_the_largest_without_overflow(dtype):
    data = [(rng.normal(size=50) * size).astype(np.float32) for size in (1e-3, 1.0, 3e4)]
    for x, scale in zip(data, run_on_each(data, fp8_amax_scale, dtype), strict=True):
        assert not is_nan(host_pow2scale_cast_to_fp8(x, dtype, scale))
        if scale < 31:
            largest = np.abs(x).max() * 2.0 ** (scale + 1)
            assert largest > fp8_def(dtype).max_value


def test_tiny_values_take_the_largest_scale():
    data = [np.full(3, value, np.float32) for value in (0.0, 1e-30)]
    assert run_on_each(data, fp8_amax_scale, popxl.float8_143) == [31, 31]


@pytest.mark.optimised
@pytest.mark.parametrize("dtype", FORMATS)
def test_mse_scale_is_the_hosts(dtype):
    data = [(rng.standard_t(2, size=400) * s).astype(np.float32) for s in (1e-2, 1.0, 700.0)]
    wanted = [host_fp8_mse_scale(x, dtype)[1] for x in data]
    assert run_on_each(data, fp8_mse_scale, dtype) == wanted


@pytest.mark.optimised
@pytest.mark.parametrize(
    ("source", "dtype"),
    [(np.float16, popxl.float8_143), slow(np.float32, popxl.float8_143),
     slow(np.float16, popxl.float8_152), (np.float32, popxl.float8_152)],
)  # fmt: skip
def test_mse_scale_is_the_hosts_for_numbers_of_any_size(source, dtype):
    """Costs that differ by less than float32 tells apart, ties, zeros, subnormals, no numbers."""
    low, high = (-24, 16) if source == np.float16 else (-140, 127)
    cases = [np.array([0.0, 0.0, np.inf]), np.array([20.0, 17.0]), np.array([1.0, 2.0**-20])]
    cases += [2.0 ** rng.uniform(low, rng.uniform(low, high), size=50) for _ in range(12)]
    data = [np.resize(x, 50).astype(source) for x in cases]
    wanted = [host_fp8_mse_scale(x, dtype)[1] for x in data]
    assert run_on_each(data, fp8_mse_scale, dtype) == wanted


def test_formats_are_those_of_the_types():
    import ml_dtypes

    for definition, dtype in zip((float8_143_def, float8_152_def), FORMATS, strict=True):
        info = ml_dtypes.finfo(dtype.as_jax())
        assert definition.max_value == float(info.max)
        assert 2.0**definition.min_exponent == float(info.smallest_subnormal)
    with pytest.raises(ValueError, match="no float8 dtype"):
        fp8_def(popxl.float16)


@pytest.mark.parametrize("metric", ["amax", "mse", "manual_scale"])
def test_linear_layer_and_its_gradients_are_close_to_exact_ones(metric):
    layer = torch.nn.Linear(16, 8)
    x = rng.normal(size=(2, 5, 16)).astype(np.float32)
    dy = rng.normal(size=(2, 5, 8)).astype(np.float32)

    def build():
        data = popxl.constant(x)
        factories, graph = LinearFP8(8, scale_metric=metric, scale=2).create_graph(data)
        grad = graph.autodiff()
        variables = factories.init()
        weights = LinearFP8.torch_mapping(variables, layer)
        for variable, value in weights.items():
            np.copyto(variable._data, value)
        info = graph.bind(variables).call_with_info(data)
        args = grad.grad_graph_info.inputs_dict(info)
        return [info.parent_output(0), *grad.call(popxl.constant(dy), args=args)]

    got = single_run(build)
    t = torch.tensor(x, requires_grad=True)
    y = layer(t)
    y.backward(torch.tensor(dy))
    wanted = [y.detach(), t.grad, layer.weight.grad.T, layer.bias.grad]
    for ours, theirs in zip(got, wanted, strict=True):
        theirs = np.asarray(theirs)
        assert np.linalg.norm(ours - theirs) < 0.08 * np.linalg.norm(theirs)
    assert not np.allclose(got[0], wanted[0], rtol=1e-4)  # it is float8


def test_metrics_are_checked():
    with pytest.raises(ValueError, match="unknown scale_metric"):
        LinearFP8(8, scale_metric="max")


def test_half_inputs_give_half_outputs():
    def build():
        x = popxl.constant(np.ones((2, 4), np.float16))
        factories, graph = LinearFP8(3, bias=False).create_graph(x)
        return list(graph.bind(factories.init()).call(x))

    assert single_run(build)[0].dtype == np.float16
