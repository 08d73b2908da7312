"""Reductions on CPU: fused with what computes their elements, and as accurate as a tree of sums."""

from __future__ import annotations

import re

import numpy as np
import pytest

import popxl
from popxl import ops
from tests.popxl.compiled import optimised
from tests.slow import slow


def _run(x: np.ndarray, *builds) -> tuple[list[np.ndarray], str]:
    """The result of each `build(x)`, and the optimised program of all."""
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        stream = popxl.h2d_stream(x.shape, popxl.float32)
        t = ops.host_load(stream)
        outs = []
        for build in builds:
            result = build(t)
            outs.append(popxl.d2h_stream(result.shape, result.dtype))
            ops.host_store(outs[-1], result)
    with popxl.Session(ir) as session:
        found = session.run({stream: x})
        return [found[out] for out in outs], optimised(session)


SHAPES = [
    *((2, 3), (5, 64), (3, 100), (4, 2, 1024), (1 << 14, 33)),
    *(slow(shape) for shape in ((7, 96), (6, 512))),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_sums_of_all_sizes_equal_those_in_double_precision(shape):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    wide = x.astype(np.float64)
    builds, wanted = zip(
        (lambda t: ops.sum(t, -1), wide.sum(-1)),
        (lambda t: ops.sum(t, 0, keepdims=True), wide.sum(0, keepdims=True)),
        (lambda t: ops.mean(t, -1, keepdims=True), wide.mean(-1, keepdims=True)),
        (lambda t: ops.sumsquare(t), (wide**2).sum()),
        strict=True,
    )
    for found, expected in zip(_run(x, *builds)[0], wanted, strict=True):
        assert found.shape == expected.shape
        scale = np.abs(wide).sum() / max(found.size, 1)
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6 * scale)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_largest_of_all_sizes_and_who_shares_its_gradient(shape):
    """Whole numbers have many equals, in any part of a row."""
    x = np.random.default_rng(2).integers(0, 9, shape).astype(np.float32)

    def gradient(t: popxl.Tensor) -> popxl.Tensor:
        graph = popxl.gir().create_graph(lambda t: ops.max(t, -1, keepdims=True), t)
        ones = popxl.constant(np.ones((*shape[:-1], 1), np.float32))
        return ops.call(popxl.transforms.autodiff(graph).graph, ones, t)[0]

    (largest, shared), _ = _run(x, lambda t: ops.max(t, -1), gradient)
    np.testing.assert_array_equal(largest, x.max(-1))
    equals = x == x.max(-1, keepdims=True)
    np.testing.assert_allclose(shared, equals / equals.sum(-1, keepdims=True), rtol=1e-6)


def test_the_squares_of_a_large_tensor_are_summed_where_they_are_made():
    x = np.random.default_rng(1).uniform(size=(1 << 12, 512)).astype(np.float32)
    (found,), text = _run(x, lambda t: ops.sumsquare(t))
    np.testing.assert_allclose(found, (x.astype(np.float64) ** 2).sum(), rtol=2e-7)
    entry = text[text.index("ENTRY") :]
    written = re.findall(r"= f32\[([\d,]+)\]\S* (?:fusion|multiply)\(", entry)
    assert max(np.prod([int(n) for n in shape.split(",")]) for shape in written) < x.size / 8


@pytest.mark.parametrize(("shape", "axes"), [((8, 128, 64), (0, 1)), ((3, 40, 6, 16), (1, 0))])
@pytest.mark.parametrize("keepdims", [False, True])
def test_leading_axes_are_summed_as_one(shape, axes, keepdims):
    """XLA adds windows of several axes element by element; the gradient of every bias and norm of
    a layer is such a sum."""
    x = np.random.default_rng(3).normal(size=shape).astype(np.float32)
    (found,), text = _run(x, lambda t: ops.sum(ops.tanh(t), axes, keepdims=keepdims))
    expected = np.tanh(x.astype(np.float64)).sum(axes, keepdims=keepdims)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6 * np.abs(x).sum() / 64)
    windows = re.findall(r"window={size=([\dx]+)", text)
    assert windows
    assert all(sum(n != "1" for n in size.split("x")) == 1 for size in windows)
