"""Reductions and normalisations of many elements of half types, against torch in float64.

A count of a million is no float16, and its reciprocal has four bits left there: what is rounded is
the result, not the numbers it is made of.
"""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch

import popxl
from popxl import ops
from popxl.ops._numerics import round_to_narrow_float, upcast_half_types
from popxl.ops._reductions import tracing_platform
from popxl.transforms import autodiff
from tests.slow import slow

LOSS_SCALE = 2.0**12  # of the gradient given, as for a loss in float16
MILLION, MORE = 10**6, 17 * 10**6
ROUNDING = {popxl.float16: 2.0**-11, popxl.bfloat16: 2.0**-8}

Function = Callable[[Any], Any]


def _gradient_of(function: Function, x: np.ndarray, dtype: popxl.dtype) -> list[np.ndarray]:
    """The result of `function`, and the gradient of its input for LOSS_SCALE, in float64."""
    ir = popxl.Ir()
    with ir.main_graph:
        stream = popxl.h2d_stream(x.shape, dtype)
        t = ops.host_load(stream)
        graph = ir.create_graph(function, t)
        call = ops.call_with_info(graph, t)
        (y,) = call.outputs
        info = autodiff(graph)
        seed = popxl.constant(np.full(y.shape, LOSS_SCALE), dtype)
        results = [y, *ops.call(info.graph, seed, inputs_dict=info.inputs_dict(call))]
        stores = [popxl.d2h_stream(r.shape, r.dtype) for r in results]
        for store, result in zip(stores, results, strict=True):
            ops.host_store(store, result)
    with popxl.Session(ir) as session:
        found = session.run({stream: x})
    return [_double(found[s]) for s in stores]


def _double(x: np.ndarray) -> np.ndarray:
    """In float64. torch is much faster than numpy at widening float16, and knows no ml_dtypes."""
    return torch.tensor(x).double().numpy() if x.dtype == np.float16 else x.astype(np.float64)


def _in_double(function: Function, x: np.ndarray) -> list[np.ndarray]:
    t = torch.tensor(_double(x), requires_grad=True)
    y = function(t)
    y.backward(torch.full_like(y, LOSS_SCALE))
    return [y.detach().numpy(), t.grad.numpy()]


def _norm(x: popxl.Tensor, norm: Function) -> popxl.Tensor:
    """The first elements of a normalised tensor: of all of them the gradient would be zero."""
    return ops.slice(norm(x), 0, 4, axis=-1)


def _layer_norm(x: popxl.Tensor) -> popxl.Tensor:
    weight, bias = (popxl.constant(np.full(x.shape, v), x.dtype) for v in (1.0, 0.0))
    return ops.layer_norm(x, weight, bias)


CASES: dict[str, tuple[Function, Function]] = {
    "mean": (ops.mean, lambda t: t.mean()),
    "mean of rows": (
        lambda t: ops.mean(ops.reshape(t, (2, -1)), 1, keepdims=True),
        lambda t: t.reshape(2, -1).mean(1, keepdim=True),
    ),
    "average pool": (
        lambda t: ops.average_pool(ops.reshape(t, (1, 1, t.nelms)), (t.nelms,)),
        lambda t: t.mean().reshape(1, 1, 1),
    ),
    "logsum": (ops.logsum, lambda t: t.sum().log()),
    "logsumexp": (ops.logsumexp, lambda t: t.logsumexp(0)),
    "l2": (ops.l2, lambda t: t.square().sum().sqrt()),
    "layer norm": (
        lambda t: _norm(t, _layer_norm),
        lambda t: torch.nn.functional.layer_norm(t, t.shape)[:4],
    ),
    "loss": (
        lambda t: ops.nll_loss(
            ops.reshape(t, (t.nelms, 1)), popxl.constant(np.zeros(t.nelms), popxl.int32)
        ),
        lambda t: -t.log().mean(),
    ),
}


def _check(name: str, count: int, dtype: popxl.dtype) -> None:
    ours, theirs = CASES[name]
    x = np.random.default_rng(0).random(count, np.float32) + np.float32(0.5)
    x = torch.tensor(x).half().numpy() if dtype == popxl.float16 else x.astype(dtype.as_numpy())
    for found, expected in zip(_gradient_of(ours, x, dtype), _in_double(theirs, x), strict=True):
        _check_rounded(found, expected, dtype)


def _check_rounded(found: np.ndarray, expected: np.ndarray, dtype: popxl.dtype) -> None:
    """Equal but for a rounding or two, and for what subnormal numbers are cut to."""
    assert found.shape == expected.shape
    allowed = np.abs(expected)
    smallest = 2.0**-24 if dtype == popxl.float16 else 0.0
    least = smallest + 1e-7 * allowed.max()
    allowed *= 2 * ROUNDING[dtype]  # in place: there are millions
    allowed += least
    error = np.asarray(found - expected)
    right = np.abs(error, out=error) <= allowed
    assert right.all(), (found[~right][:9], expected[~right][:9])


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, popxl.float16) for name in CASES),
        ("logsumexp", popxl.bfloat16),
        *(slow(name, popxl.bfloat16) for name in CASES if name != "logsumexp"),
    ],
    ids=str,
)
def test_a_million_elements(name, dtype):
    _check(name, MILLION, dtype)


@pytest.mark.parametrize("name", ["mean", slow("average pool")])
def test_so_many_that_the_reciprocal_of_their_number_is_no_float16(name):
    _check(name, MORE, popxl.float16)


# ---- drawn at random ----------------------------------------------------------------------------
DRAWN: dict[str, tuple[Function, Function]] = {
    "mean": (ops.mean, lambda t, axes, keep: t.mean(axes, keepdim=keep)),
    "sum": (ops.sum, lambda t, axes, keep: t.sum(axes, keepdim=keep)),
    "sumsquare": (ops.sumsquare, lambda t, axes, keep: t.square().sum(axes, keepdim=keep)),
    "l1": (ops.l1, lambda t, axes, keep: t.abs().sum(axes, keepdim=keep)),
    "l2": (ops.l2, lambda t, axes, keep: t.square().sum(axes, keepdim=keep).sqrt()),
    "logsum": (ops.logsum, lambda t, axes, keep: t.sum(axes, keepdim=keep).log()),
    "logsumexp": (ops.logsumexp, lambda t, axes, keep: t.logsumexp(axes, keepdim=keep)),
    "max": (ops.max, lambda t, axes, keep: t.amax(axes, keepdim=keep)),
}
SHAPES = [(1000003,), (2, 500009), (1009, 991), (1, 7, 142867), (17, 241, 251), (3, 1, 333337)]
SEEDS = [0, 1, *(slow(i) for i in range(2, 200))]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_reduction_drawn_at_random(seed):
    draw = random.Random(seed)
    name, shape = draw.choice(sorted(DRAWN)), draw.choice(SHAPES)
    dtype = draw.choice([popxl.float16, popxl.bfloat16])
    axes = tuple(sorted(draw.sample(range(len(shape)), draw.randint(1, len(shape)))))
    keep = draw.random() < 0.5
    ours, theirs = DRAWN[name]
    count = math.prod(shape[i] for i in axes)
    # Sums stay below the largest float16, of squares too.
    size = {"sum": 1e4 / count, "l1": 1e4 / count, "sumsquare": (1e4 / count) ** 0.5}.get(name, 1.0)
    x = np.random.default_rng(seed).random(shape, np.float32) + np.float32(0.5)
    x = (x * np.float32(min(size, 1.0))).astype(dtype.as_numpy())
    found = _gradient_of(lambda t: ours(t, axes, keep), x, dtype)
    for a, b in zip(found, _in_double(lambda t: theirs(t, axes, keep), x), strict=True):
        _check_rounded(a, b, dtype)


@pytest.mark.parametrize("target", ["cpu", "gpu"])
@pytest.mark.parametrize("combine", [operator.mul, operator.add])
def test_rounded_results_are_numpys_for_numbers_of_any_size(combine, target):
    """Subnormal numbers too."""
    bits = np.random.default_rng(0).integers(0, 2**16, (2, 200_000), np.uint16)
    a, b = bits.view(np.float16)
    with np.errstate(all="ignore"):
        expected = combine(a, b)
    with tracing_platform(target):
        # In float32: a reduction to the precision that a type has anyway is taken out.
        def rounded(a, b):
            wide = upcast_half_types(combine(a, b))
            return round_to_narrow_float(np.float16, wide).astype(np.float16)

        found = jax.jit(rounded)(a, b)
    np.testing.assert_array_equal(np.asarray(found), expected)
