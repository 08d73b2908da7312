"""FP8 linear maps and torch's: quantised with torch's float8 types, multiplied in float32."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import popxl
import popxl_addons as addons
from popxl import ops
from popxl.ops import fp8
from tests.popxl.ops.harness import evaluate
from tests.slow import slow

pytestmark = pytest.mark.usefixtures("compiled_quickly")

TORCH = {
    popxl.float8_e4m3fn: (torch.float8_e4m3fn, 448.0),
    popxl.float8_e5m2: (torch.float8_e5m2, 57344.0),
}
ROUNDING = 1e-5
"""Largest error of float32 sums, relative to the largest element: their order is not torch's."""


# ---- casts --------------------------------------------------------------------------------------
def their_cast(x: torch.Tensor, scale: float, dtype: popxl.dtype) -> torch.Tensor:
    """Scaled, cut off and rounded by torch, as float32."""
    kind, largest = TORCH[dtype]
    return (x.float() * scale).clamp(-largest, largest).to(kind).float()


def hard_numbers() -> np.ndarray:
    """All numbers of both types, those halfway between neighbours, and what is near or beyond."""
    found = [
        np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, 1e-38, 3e38, 449.0, 480.0, 57345.0])
    ]
    for kind, _ in TORCH.values():
        every = torch.arange(256, dtype=torch.uint8).view(kind).float().numpy()
        finite = np.unique(every[np.isfinite(every)])
        halves = (finite[1:] + finite[:-1]) / 2
        around = [np.nextafter(halves, np.float32(s), dtype=np.float32) for s in (-1e9, 1e9)]
        found += [finite, halves, *around]
    return np.concatenate(found).astype(np.float32)


@pytest.mark.optimised
@pytest.mark.parametrize("dtype", TORCH, ids=lambda d: d.name)
@pytest.mark.parametrize("given", ["float32", "bfloat16", "float16"])
def test_casts_are_torchs(dtype, given):
    x, scales = torch.tensor(hard_numbers()).to(getattr(torch, given)), (1.0, 0.3, 2.0**9)
    casts = evaluate(
        lambda t: [fp8.cast(t, popxl.constant(s, popxl.float32), dtype) for s in scales],
        x.float().numpy().astype(popxl.dtype.from_name(given).as_numpy()),
    )
    for found, scale in zip(casts, scales, strict=True):
        expected = their_cast(x, scale, dtype).numpy()
        assert found.dtype == dtype.as_numpy()
        np.testing.assert_array_equal(found.astype(np.float32), expected, f"scale {scale}")


# ---- the linear map -----------------------------------------------------------------------------
class Linear(addons.Module):
    """A matrix, and the scales of its operands."""

    def build(self, x: popxl.Tensor, w: popxl.Tensor, scale: popxl.Tensor, *bias, kwargs: dict):
        kwargs = kwargs | {"bias": bias[0]} if bias else kwargs
        if kwargs.get("rule") is not None:
            return fp8.linear(x, w, **kwargs)
        return fp8.linear(x, w, scale, **kwargs)


def ours(x, w, dy, scale, dtype=popxl.float32, bias=(), **kwargs) -> dict[str, np.ndarray]:
    """Output, gradients, and (with delayed scaling) amaxes."""
    ir = popxl.Ir()
    with ir.main_graph:
        values = [popxl.variable(a, dtype) for a in (x, w)] + [popxl.variable(scale, popxl.float32)]
        values += [popxl.variable(b, dtype) for b in bias]
        graph = ir.create_graph(Linear(), *(v.spec for v in values), kwargs=kwargs)
        call = ops.call_with_info(graph, *values)
        info = popxl.transforms.autodiff(graph, [graph.outputs[0]])
        given = popxl.variable(dy, dtype)
        grad = ops.call_with_info(info.graph, given, inputs_dict=info.inputs_dict(call))
        names = dict(zip(graph.inputs, ("dx", "dw", "amax", "db"), strict=False))
        streams = {"y": addons.host_store(call.outputs[0])}
        for t, g in info.fwd_graph_ins_to_grad_parent_outs(grad).items():
            streams[names[t]] = addons.host_store(g)
    with popxl.Session(ir, "cpu") as session:
        found = session.run()
    return {name: found[s] for name, s in streams.items()}


def theirs(x, w, dy, scale, kinds) -> dict[str, np.ndarray]:
    """Reference in torch: three float32 products of operands that torch rounds."""
    x, w, dy = (torch.tensor(a) for a in (x, w, dy))
    x8, w8, dy8 = (
        their_cast(t, s, kind)
        for t, s, kind in zip((x, w, dy), map(float, scale), kinds, strict=True)
    )
    sx, sw, sg = map(float, scale)
    rows, dy_rows = x8.reshape(-1, x.shape[-1]), dy8.reshape(-1, dy.shape[-1])
    amax = torch.stack([t.abs().max() for t in (x, w, dy)])
    return {
        "y": (x8 @ w8 / sx / sw).numpy(),
        "dx": (dy8 @ w8.T / sg / sw).numpy(),
        "dw": (rows.T @ dy_rows / sx / sg).numpy(),
        "amax": amax.numpy(),
    }


def check(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    for name, array in found.items():
        wanted = expected[name]
        assert array.shape == wanted.shape
        if name == "amax":
            np.testing.assert_array_equal(array, wanted)
            continue
        np.testing.assert_array_equal(np.isnan(array), np.isnan(wanted), name)
        size = np.nanmax(np.abs(wanted), initial=0.0)
        np.testing.assert_allclose(array, wanted, rtol=0, atol=ROUNDING * size, err_msg=name)


def operands(kind: str) -> tuple[np.ndarray, ...]:
    """x (2, 5, 48), w (48, 32), dy (2, 5, 32)."""
    rng = np.random.default_rng(3)
    x, w, dy = (
        rng.standard_normal(s).astype(np.float32) for s in ((2, 5, 48), (48, 32), (2, 5, 32))
    )
    if kind == "subnormal":  # in float8, at scale 1
        return x * 2e-3, w * 1e-2, dy * 1e-5
    if kind == "past the range":
        return x * 500, w * 300, dy * 1e5
    if kind == "zeros":
        return x * 0, w, dy * 0
    if kind == "not a number":
        x[0, 1, 2] = np.nan
        dy[1, 4, 7] = np.inf
    return x, w, dy


@pytest.mark.parametrize("format", fp8.FORMATS)
@pytest.mark.parametrize("kind", ["random", "subnormal", "past the range", "zeros", "not a number"])
@pytest.mark.usefixtures("cached")
def test_a_linear_map_and_its_gradients_are_torchs(kind, format):
    given, scale = operands(kind), np.array([1.0, 0.7, 4.0], np.float32)
    check(ours(*given, scale, format=format), theirs(*given, scale, fp8.FORMATS[format].types))


@pytest.mark.parametrize("power_of_2", [True, False])
def test_current_scaling_takes_the_scales_of_its_operands(power_of_2):
    given, rule = operands("random"), fp8.ScaleRule(margin=1, power_of_2=power_of_2)
    kinds = fp8.FORMATS["hybrid"].types
    ratios = [TORCH[k][1] / np.abs(t).max() / 2 for k, t in zip(kinds, given, strict=True)]
    scale = [2.0 ** np.floor(np.log2(r)) if power_of_2 else np.float32(r) for r in ratios]
    found = ours(*given, np.ones(3), rule=rule)
    assert "amax" not in found
    check(found, theirs(*given, scale, kinds))


@pytest.mark.optimised
@pytest.mark.parametrize("rule", [None, fp8.EXACT])
def test_a_product_in_bfloat16_with_a_bias_is_torchs(rule):
    """Scales that are powers of two are folded into the operands, where they change no bit."""
    x, w, dy = (torch.tensor(t).to(torch.bfloat16).float().numpy() for t in operands("random"))
    bias = np.linspace(-2, 2, w.shape[1]).astype(popxl.bfloat16.as_numpy())
    kinds = fp8.FORMATS["hybrid"].types
    ratios = [TORCH[k][1] / np.abs(t).max() for k, t in zip(kinds, (x, w, dy), strict=True)]
    scale = 2.0 ** np.floor(np.log2(ratios))
    found = ours(x, w, dy, scale, popxl.bfloat16, [bias], rule=rule, powers_of_2=True)
    wanted = theirs(x, w, dy, scale, kinds)
    rounded = torch.tensor(wanted["y"]).to(torch.bfloat16).float().numpy()
    wanted |= {"y": rounded + bias.astype(np.float32), "db": dy.reshape(-1, dy.shape[-1]).sum(0)}
    for name in ("y", "dx", "dw", "db"):
        assert found[name].dtype == popxl.bfloat16.as_numpy()
        array = found[name].astype(np.float32)
        np.testing.assert_allclose(array, wanted[name], rtol=2**-8, atol=1e-5, err_msg=name)


@pytest.mark.optimised
def test_sums_are_float32_whatever_the_dtype():
    """4096 equal terms: a sum in 16 bits would stop growing at 256, and one in 8 bits at 16."""
    x, w, dy = np.ones((1, 4096)), np.ones((4096, 16)), np.ones((1, 16))
    found = ours(x, w, dy, np.ones(3), popxl.bfloat16)
    np.testing.assert_array_equal(found["y"].astype(np.float32), np.full((1, 16), 4096))
    assert found["dx"].dtype == found["dw"].dtype == popxl.bfloat16.as_numpy()


def test_errors_say_what_to_do():
    x, w, scale = np.ones((2, 4)), np.ones((3, 4)), np.ones(3)
    with pytest.raises(popxl.errors.SpecError, match="do not fit"):
        ours(x, w, x, scale)
    for kwargs, message in (
        ({"format": "fp4"}, "use one of hybrid, e4m3"),
        ({"rule": fp8.ScaleRule(), "format": "e3"}, "unknown FP8 format"),
    ):
        with pytest.raises(ValueError, match=message):
            ours(x, x.T, x, scale, **kwargs)
    ir = popxl.Ir()
    with ir.main_graph:
        t = popxl.constant(np.ones((2, 2)), popxl.float32)
        with pytest.raises(ValueError, match="give `scale`"):
            fp8.linear(t, t)
        with pytest.raises(TypeError, match="neither"):
            fp8.cast(t, t, popxl.float8_143)
        with pytest.raises(TypeError, match="use fp8.cast"):
            ops.cast(t, popxl.float8_e5m2)
        with pytest.raises(ValueError, match="needs `step`"):
            fp8.delayed_scales(t, t, t, interval=2)


# ---- observed maxima ----------------------------------------------------------------------------
def amax_of_program(build, calls: int) -> np.ndarray:
    """The amaxes that come out of `build(x, w, scale)`, with x = 1, 2, ... in its calls."""
    ir = popxl.Ir()
    with ir.main_graph:
        w, scale = (popxl.variable(np.ones(s), popxl.float32) for s in ((4, 4), (3,)))
        x = popxl.variable(np.ones((2, 4)), popxl.float32)
        graph = ir.create_graph(build, x.spec, w.spec, scale.spec)
        info = popxl.transforms.autodiff(graph, [graph.outputs[0]], [graph.inputs[2]])
        call = ops.call_with_info(graph, x, w, scale)
        (amax,) = ops.call(
            info.graph, popxl.constant(np.ones((2, 4)), popxl.float32),
            inputs_dict=info.inputs_dict(call),
        )  # fmt: skip
        out = addons.host_store(amax)
    with popxl.Session(ir, "cpu") as session:
        return session.run()[out]


def test_of_several_uses_the_largest_counts():
    """One matrix is used three times, two of them in a graph that is called twice."""

    def inner(x, w, scale):
        return fp8.linear(x, w, scale) * 0.25

    def build(x, w, scale):
        graph = popxl.gir().create_graph(inner, x.spec, w.spec, scale.spec)
        y = fp8.linear(x * 3.0, w, scale)
        (z,) = ops.call(graph, x * 5.0, w, scale)
        (z,) = ops.call(graph, z, w, scale)
        return y + z

    # x is 1: 3; 5; 5 * 4 / 4. Gradients are 1; 1/4 of 4/4; 1/4.
    np.testing.assert_allclose(amax_of_program(build, 3), [5, 1, 1])


def test_in_a_loop_the_largest_iteration_counts():
    def body(x, w, scale):
        return fp8.linear(x, w, scale) * 0.5

    def build(x, w, scale):
        graph = popxl.gir().create_graph(body, x, w, scale)
        (y,) = ops.repeat(graph, 3, x, w, scale)
        return y

    # x: 1, 2, 4; gradients: 0.5, 1, 2.
    np.testing.assert_allclose(amax_of_program(build, 3), [4, 1, 2])


def test_accumulating_takes_the_maximum_of_what_is_observed_and_the_mean_of_gradients():
    ir = popxl.Ir()
    with ir.main_graph:
        specs = [popxl.TensorSpec(s, popxl.float32) for s in ((2, 4), (4, 4), (3,))]
        graph = addons.GraphWithNamedArgs(ir.create_graph(fp8.linear, *specs))
        _, w, scale = graph.graph.inputs
        facts, grad = addons.autodiff_with_accumulation(graph, [w, scale])
        sums = facts.init_zero()
        values = [popxl.constant(np.ones(s.shape), popxl.float32) for s in specs]
        for x in (1.0, 4.0, 2.0):
            values[0] = popxl.constant(np.full((2, 4), x), popxl.float32)
            call = graph.call_with_info(*values)
            given = popxl.constant(np.full((2, 4), 3 / x), popxl.float32)
            grad.bind(sums).call(given, args=grad.grad_graph_info.inputs_dict(call))
        out = {n: addons.host_store(t) for n, t in sums.to_dict().items()}
    with popxl.Session(ir, "cpu") as session:
        found = session.run()
    np.testing.assert_allclose(found[out["accum.scale"]], [4, 1, 3])
    np.testing.assert_allclose(found[out["accum.weight"]], np.full((4, 4), 6))
    assert found[out["mean_accum_counter"]] == 3


# ---- delayed scaling against the recipe in numpy ------------------------------------------------
def reference(amaxes, largest, margin, power_of_2, amax_of, interval, length):
    """Delayed scaling of one operand, written out: the scale after each step."""
    scale, history, scales = 1.0, [0.0] * length, []
    for step, amax in enumerate(amaxes):
        history = [float(amax) if np.isfinite(amax) else 0.0, *history[:-1]]
        chosen = max(history) if amax_of == "max" else history[0]
        if step % interval == 0 and chosen > 0:
            scale = largest / chosen / 2.0**margin
            if power_of_2:
                scale = 2.0 ** math.floor(math.log2(scale))
            scale = min(scale, 2.0**127 if power_of_2 else float(np.finfo(np.float32).max))
        scales.append(scale)
    return scales, history


@pytest.mark.parametrize(
    ("format", "power_of_2"),
    [("hybrid", True), ("e4m3", False), slow("hybrid", False), slow("e4m3", True)],
)
@pytest.mark.parametrize(
    ("margin", "amax_of", "interval", "length"),
    [(0, "max", 1, 16), (1, "most_recent", 1, 4), (2, "max", 7, 8)],
)
def test_delayed_scales_are_the_recipes_over_50_steps(
    format, power_of_2, margin, amax_of, interval, length
):
    rng = np.random.default_rng(11)
    amaxes = np.exp(rng.normal(0, 6, (50, 3))).astype(np.float32)
    amaxes[3:6] = 0
    amaxes[9, 0], amaxes[9, 1], amaxes[20, 2], amaxes[30, 1] = np.inf, np.nan, 1e-45, 1e-37
    amaxes[40] = 448 * 2.0 ** np.array([-3, 0, 5])  # exactly on powers of two
    rule = fp8.ScaleRule(margin, power_of_2)
    ir = popxl.Ir()
    ir.num_host_transfers = 50
    with ir.main_graph:
        state = [
            popxl.variable(np.ones(3), popxl.float32),
            popxl.variable(np.zeros((3, length)), popxl.float32),
            popxl.variable(np.int32(0)),
        ]
        state = state if interval > 1 else state[:2]
        amax = popxl.h2d_stream((3,), popxl.float32)
        out = popxl.d2h_stream((3,), popxl.float32)

        def step(state: list[popxl.TensorByRef]) -> None:
            scale, history, *number = state
            new = fp8.delayed_scales(
                scale, history, ops.host_load(amax), *number,
                format=format, rule=rule, amax_of=amax_of, interval=interval,
            )  # fmt: skip
            for old, t in zip(state, new, strict=True):
                ops.var_updates.copy_var_update_(old, t)
            ops.host_store(out, new[0])

        ops.repeat(ir.create_graph(step, state), 50, *state)
    with popxl.Session(ir, "cpu") as session:
        scales = session.run({amax: amaxes})[out]
        history = session.get_tensor_data(state[1])
    for i, kind in enumerate(fp8.FORMATS[format].types):
        expected, last = reference(
            amaxes[:, i], TORCH[kind][1], margin, power_of_2, amax_of, interval, length
        )
        if power_of_2:
            np.testing.assert_array_equal(scales[:, i], np.float32(expected))
        else:
            np.testing.assert_allclose(scales[:, i], expected, rtol=3e-7)
        np.testing.assert_array_equal(history[i], np.float32(last))
