"""AdamW with moments in 8 bits and weights in 16 + 8, against formulas in float64.

The formulas of FlashOptim (arXiv:2602.23349), written out again: what `state_8bit` computes in
float32 must give their codes, except where a value lies between two codes to within the rounding
of float32.
"""

import ml_dtypes
import numpy as np
import pytest
import torch

import popxl
from popxl import ops
from popxl._compile.cache_key import segment_lines
from popxl_addons import NamedTensors, round_by_hash
from popxl_addons.optimizers import Adam8bitOptimizerStep, state_8bit
from popxl_addons.optimizers.weight_residual import join_weight, split_weight
from popxl_addons.remote import load_remote, named_variable_buffers, store_remote
from popxl_addons.variable_factory import NamedVariableFactories, VariableFactory
from tests.slow import slow

pytestmark = pytest.mark.optimised  # XLA might simplify roundings away

BFLOAT16 = ml_dtypes.bfloat16
SHAPES = [((64, 96), 0), ((64, 96), 1), ((3, 70), 1), ((33, 5), 0), ((1, 1), 1), ((2, 3, 40), 2)]


def values(shape, seed=0):
    """Numbers of very different sizes, zeros among them."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) * np.exp(3 * rng.normal(size=shape) - 12)
    return np.where(rng.random(shape) < 0.05, 0, x).astype(np.float32)


def in_float64(x, axis, first):
    """Exact codes before rounding, the scale of each element, and what codes stand for."""
    x = np.moveaxis(np.asarray(x, np.float64), axis, -1)
    blocks = [x[..., i : i + 32] for i in range(0, x.shape[-1], 32)]
    codes, scales = [], []
    for g in blocks:
        size = np.abs(g) if first else np.sqrt(g)
        s = size.max(-1, keepdims=True).astype(np.float32).astype(BFLOAT16).astype(np.float64)
        ratio = np.clip((g if first else size) / np.where(s > 0, s, 1), -1, 1)
        codes.append(2 * ratio / (1 + np.abs(ratio)) * 127 if first else ratio * 255)
        scales.append(np.broadcast_to(s, g.shape))
    return [np.moveaxis(np.concatenate(part, -1), -1, axis) for part in (codes, scales)]


@pytest.mark.parametrize(("shape", "axis"), SHAPES)
@pytest.mark.parametrize("seed", range(3))
def test_codes_are_those_of_the_formulas(shape, axis, seed) -> None:
    blocks = state_8bit.QuantBlocks.along_axis(axis, shape)
    m = values(shape, seed)
    for first, x in ((True, m), (False, m * m)):
        pack, unpack = (
            (state_8bit.quantize_first_moment, state_8bit.dequantize_first_moment)
            if first
            else (state_8bit.quantize_second_moment, state_8bit.dequantize_second_moment)
        )
        codes, scales = pack(x, blocks)
        exact, scale = in_float64(x, axis, first)
        sure = np.abs(exact - np.floor(exact) - 0.5) > 1e-4
        assert sure.mean() > 0.99 or sure.size < 100
        wanted = np.round(exact)
        if not first:
            wanted = np.where((x > 0) & (wanted == 0), 1, wanted)
        np.testing.assert_array_equal(codes[sure], wanted[sure])
        assert scales.dtype == BFLOAT16
        assert scales.size == np.prod(state_8bit.scales_shape(shape, axis))
        z = codes.astype(np.float64) / (127 if first else 255)
        expected = z / (2 - np.abs(z)) * scale if first else (z * scale) ** 2
        np.testing.assert_allclose(unpack(codes, scales, blocks), expected, rtol=1e-6)


def test_a_second_moment_is_zero_only_where_it_was() -> None:
    """An element far below the largest of its group would make a step as long as it likes."""
    v = np.zeros((1, 32), np.float32)
    v[0, :3] = [1.0, 1e-12, 1e-30]
    blocks = state_8bit.QuantBlocks.along_axis(1, v.shape)
    codes, scales = state_8bit.quantize_second_moment(v, blocks)
    assert codes[0].tolist() == [255, 1, 1] + 29 * [0]
    found = state_8bit.dequantize_second_moment(codes, scales, blocks)
    assert (found[v > 0] > 0).all()
    assert (found[0, 1:3] >= v[0, 1:3]).all()  # so the steps are shorter, never longer


def test_small_scales_are_no_zeros() -> None:
    """float16, which the paper has, ends at 6e-8; roots of second moments are often smaller."""
    m = np.full((1, 32), 1e-12, np.float32)
    blocks = state_8bit.QuantBlocks.along_axis(1, m.shape)
    np.testing.assert_allclose(
        state_8bit.dequantize_first_moment(*state_8bit.quantize_first_moment(m, blocks), blocks),
        m,
        rtol=4e-3,
    )
    square = state_8bit.dequantize_second_moment(
        *state_8bit.quantize_second_moment(m * m, blocks), blocks
    )
    np.testing.assert_allclose(np.sqrt(square), m, rtol=4e-3)


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("dtype", [BFLOAT16, np.float16])
def test_a_weight_is_its_rounding_and_what_that_took(dtype, bits) -> None:
    info = ml_dtypes.finfo(dtype)
    special = [0.0, -0.0, 1.0, -1.0, float(info.max), -float(info.max), float(info.smallest_normal),
               float(info.smallest_subnormal) if dtype is np.float16 else 2.0**-120,
               1 + float(info.eps) / 2, 2 - float(info.eps) / 4]  # fmt: skip
    random = np.clip(values((5000,)) * 1e3, -6e4, 6e4)
    weight = np.concatenate([special, random]).astype(np.float32)
    low, rest = state_8bit.split_weight(weight, dtype, bits)
    np.testing.assert_array_equal(low, weight.astype(dtype))
    found = state_8bit.join_weight(low, rest)
    # Half a step of the residual, which counts half a step of the type; float32 rounds the sum.
    step = np.maximum(
        2.0 ** np.floor(np.log2(np.maximum(np.abs(low.astype(np.float64)), 1e-38)))
        * float(info.eps),
        2.0**-24 if dtype is np.float16 else 2.0**-125,
    )
    bound = step / 2 / (2 ** (bits - 1) - 1) / 2 + np.abs(weight) * 2.0**-24
    assert (np.abs(found.astype(np.float64) - weight) <= bound).all()
    # Packed once more, nothing changes: an update of zero leaves the weight.
    np.testing.assert_array_equal(
        state_8bit.join_weight(*state_8bit.split_weight(found, dtype, bits)), found
    )


def test_what_is_not_finite_stays_so() -> None:
    weight = np.array([np.inf, -np.inf, np.nan, 3.4e38], np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        low, rest = state_8bit.split_weight(weight, BFLOAT16, 8)
        found = state_8bit.join_weight(low, rest)
    assert rest.tolist() == [0, 0, 0, 0]
    assert not np.isfinite(found).any()


def test_groups_that_parts_would_cut_are_refused() -> None:
    along = state_8bit.QuantBlocks.along_axis
    assert along(0, (64, 5), 2) == state_8bit.QuantBlocks(1, 32, 5)
    assert along(0, (64, 5), 4) is None
    assert along(1, (64, 5), 4) == state_8bit.QuantBlocks(16, 5, 1)
    assert along(1, (6, 64), 4) == state_8bit.QuantBlocks(1, 96, 1)
    assert along(1, (6, 65), 4) is None
    ir = popxl.Ir(replication=4)
    with ir.main_graph:
        spec = popxl.TensorSpec((80,), popxl.float32, (64, 5))
        with pytest.raises(ValueError, match="4 shards .* split blocks of 32 along axis 0"):
            Adam8bitOptimizerStep().create_graph(spec, spec, lr=0.1, axis=0)


def test_axes_are_counted_from_either_end() -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        var = popxl.variable(np.ones((4, 40), np.float32), name="w")
        scales = [
            Adam8bitOptimizerStep().create_graph(var, var.spec, lr=0.1, axis=axis)[0].to_dict()
            for axis in (0, -2, 1, -1)
        ]
        shapes = [{name: f.shape for name, f in facts.items()} for facts in scales]
        assert shapes[0] == shapes[1] != shapes[2] == shapes[3]
        for axis in (2, -3):
            with pytest.raises(ValueError, match=rf"'.*var' of shape \(4, 40\) has no axis {axis}"):
                Adam8bitOptimizerStep().create_graph(var, var.spec, lr=0.1, axis=axis)


# ---- steps --------------------------------------------------------------------------------------
STEPS, SHAPE = 6, (64, 40)
W = np.random.default_rng(1).normal(size=SHAPE).astype(np.float32)
GRADS = [
    (np.random.default_rng(10 + i).normal(size=SHAPE) * 1e-6).astype(np.float32)
    for i in range(STEPS)
]
SETTINGS = {"lr": 0.01, "beta1": 0.8, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


def by_numpy(axis):
    """AdamW in float64 whose moments go through the packed form after each step."""
    w, blocks = W.astype(np.float64), state_8bit.QuantBlocks.along_axis(axis, SHAPE)
    m, v = np.zeros(SHAPE), np.zeros(SHAPE)
    b1, b2, s = SETTINGS["beta1"], SETTINGS["beta2"], SETTINGS
    for t, g in enumerate(GRADS, 1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * np.square(g, dtype=np.float64)
        up = m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + s["eps"])
        w = w - s["lr"] * (up + s["weight_decay"] * w)
        m = state_8bit.dequantize_first_moment(
            *state_8bit.quantize_first_moment(m.astype(np.float32), blocks), blocks
        )
        v = state_8bit.dequantize_second_moment(
            *state_8bit.quantize_second_moment(v.astype(np.float32), blocks), blocks
        )
        m, v = m.astype(np.float64), v.astype(np.float64)
    return w


def by_torch():
    p = torch.nn.Parameter(torch.tensor(W))
    s = SETTINGS
    adam = torch.optim.AdamW([p], s["lr"], (s["beta1"], s["beta2"]), s["eps"], s["weight_decay"])
    for g in GRADS:
        p.grad = torch.tensor(g)
        adam.step()
    return p.detach().numpy()


def run(axis, replicas=1):
    """Steps on replicas that each keep a part of everything."""
    ir = popxl.Ir(replication=replicas)
    with ir.main_graph:
        stream = popxl.h2d_stream(SHAPE, popxl.float32)
        grad, group = ops.host_load(stream), ir.replica_grouping()
        weight = NamedVariableFactories(w=VariableFactory(W, name="w"))
        buffers = named_variable_buffers(weight)
        variables = weight.init_remote(buffers)
        part = load_remote(buffers)
        grad_part = grad if replicas == 1 else ops.collectives.replica_sharded_slice(grad, group)
        facts, step = Adam8bitOptimizerStep().create_graph(
            part.w, grad_part, group, axis=axis, **SETTINGS
        )
        state_buffers = named_variable_buffers(facts)
        facts.init_remote(state_buffers)
        state = load_remote(state_buffers)
        step.bind(state).call(part.w, grad_part)
        store_remote(buffers, NamedTensors(w=part.w))
        store_remote(state_buffers, state)
    with popxl.Session(ir) as session:
        for g in GRADS:
            session.run({stream: g if replicas == 1 else np.repeat(g[None], replicas, 0)})
    return session.get_tensor_data(variables.w)


@pytest.mark.parametrize(("axis", "replicas"), [slow(0, 1), (1, 1), (0, 2), slow(1, 4)])
def test_steps_are_those_of_adamw_with_packed_moments(axis, replicas) -> None:
    """However many replicas share the weight; and they stay near those of moments in float32."""
    found = run(axis, replicas)
    moved = np.abs(W - by_torch()).mean()
    assert np.abs(found - by_numpy(axis)).mean() < 1e-4 * moved
    assert np.abs(found - by_torch()).mean() < 0.01 * moved


@pytest.mark.parametrize("dtype", [popxl.int8, popxl.int16])
def test_residuals_add_up_updates_that_16_bits_lose(dtype) -> None:
    """1,000 updates of a thousandth of a step of bfloat16, each lost without a residual."""
    start = np.linspace(1, 2, 33, dtype=np.float32)[:-1].astype(BFLOAT16)
    small = np.float32(2.0**-7 / (100 if dtype == popxl.int8 else 1000))
    ir = popxl.Ir()
    ir.num_host_transfers = 1
    with ir.main_graph:
        var = popxl.variable(start, popxl.bfloat16, name="w")
        rest = popxl.variable(np.zeros(32, np.int8), dtype, name="rest")

        def update(var: popxl.TensorByRef, rest: popxl.TensorByRef) -> None:
            low, residual = split_weight(join_weight(var, rest) + small, var, rest)
            ops.var_updates.copy_var_update_(var, low)
            ops.var_updates.copy_var_update_(rest, residual)

        ops.repeat(ir.create_graph(update, var, rest), 1000, var, rest)
    with popxl.Session(ir) as session:
        session.run()
    low, residual = session.get_tensor_data(var), session.get_tensor_data(rest)
    found = state_8bit.join_weight(low, residual).astype(np.float64) - start.astype(np.float64)
    np.testing.assert_allclose(found, 1000 * small, rtol=0.3 if dtype == popxl.int8 else 0.02)
    assert (low != start).all()


def test_a_hash_rounds_to_neighbours_and_right_on_average() -> None:
    """Values of the type stay; equal values are rounded equally wherever they are."""
    x = np.concatenate([values((40_000,)), values((40_000,))[::-1], [0.0, 1.0, -2.0]])
    x = x.astype(np.float32)
    ir = popxl.Ir()
    with ir.main_graph:
        out = popxl.d2h_stream(x.shape, popxl.bfloat16)
        ops.host_store(out, round_by_hash(popxl.constant(x), popxl.bfloat16))
    with popxl.Session(ir) as session:
        found = session.run()[out].astype(np.float64)
    assert found[-3:].tolist() == [0.0, 1.0, -2.0]
    np.testing.assert_array_equal(found[:40_000], found[40_000:80_000][::-1])
    step = np.exp2(np.floor(np.log2(np.abs(np.where(x == 0, 1, x)))) - 7)
    off = (found - x) / step
    assert (np.abs(off) < 1).all()
    assert abs(off.mean()) < 0.01
    up = off[off != 0] > 0
    assert 0.48 < up.mean() < 0.52


def test_an_update_can_be_kept_in_the_executable_cache() -> None:
    """How the state is divided into blocks is in the key, as text."""

    def key(axis: int) -> list[str]:
        ir = popxl.Ir()
        with ir.main_graph:
            var, grad = (popxl.variable(W) for _ in range(2))
            facts, step = Adam8bitOptimizerStep().create_graph(var, grad, axis=axis, **SETTINGS)
            step.bind(facts.init()).call(var, grad)
        segments = popxl.plan.trace_program(ir).schedule.segments
        return [line for s in segments for line in segment_lines(ir, "cpu", s)]

    assert key(0) == key(0) != key(1)
