"""Reductions on CPU: fused with what computes their elements, and as accurate as a tree of sums."""

from __future__ import annotations

import re

import numpy as np
import pytest

import popxl
from popxl import ops
from tests.popxl.compiled import optimised


def _run(x: np.ndarray, build) -> tuple[np.ndarray, str]:
    """The result of `build(x)`, and the optimised program."""
    ir = popxl.Ir()
    with ir.main_graph:
        stream = popxl.h2d_stream(x.shape, popxl.float32)
        result = build(ops.host_load(stream))
        out = popxl.d2h_stream(result.shape, result.dtype)
        ops.host_store(out, result)
    with popxl.Session(ir) as session:
        return session.run({stream: x})[out], optimised(session)


SHAPES = [(2, 3), (5, 64), (7, 96), (3, 100), (6, 512), (4, 2, 1024), (1 << 14, 33)]


@pytest.mark.parametrize("shape", SHAPES)
def test_sums_of_all_sizes_equal_those_in_double_precision(shape):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    wide = x.astype(np.float64)
    for build, expected in (
        (lambda t: ops.sum(t, -1), wide.sum(-1)),
        (lambda t: ops.sum(t, 0, keepdims=True), wide.sum(0, keepdims=True)),
        (lambda t: ops.mean(t, -1, keepdims=True), wide.mean(-1, keepdims=True)),
        (lambda t: ops.sumsquare(t), (wide**2).sum()),
    ):
        found, _ = _run(x, build)
        assert found.shape == expected.shape
        scale = np.abs(wide).sum() / max(found.size, 1)
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6 * scale)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_largest_of_all_sizes_and_who_shares_its_gradient(shape):
    """Whole numbers have many equals, in any part of a row."""
    x = np.random.default_rng(2).integers(0, 9, shape).astype(np.float32)
    found, _ = _run(x, lambda t: ops.max(t, -1))
    np.testing.assert_array_equal(found, x.max(-1))
    ir = popxl.Ir()
    with ir.main_graph:
        graph = ir.create_graph(lambda t: ops.max(t, -1, keepdims=True), popxl.constant(x))
        gradient = popxl.transforms.autodiff(graph).graph
        ones = popxl.constant(np.ones((*shape[:-1], 1), np.float32))
        out = popxl.d2h_stream(x.shape, popxl.float32)
        ops.host_store(out, ops.call(gradient, ones, popxl.constant(x))[0])
    with popxl.Session(ir) as session:
        equals = x == x.max(-1, keepdims=True)
        shared = equals / equals.sum(-1, keepdims=True)
        np.testing.assert_allclose(session.run()[out], shared, rtol=1e-6)


def test_the_squares_of_a_large_tensor_are_summed_where_they_are_made():
    x = np.random.default_rng(1).uniform(size=(1 << 12, 512)).astype(np.float32)
    found, text = _run(x, lambda t: ops.sumsquare(t))
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
    found, text = _run(x, lambda t: ops.sum(ops.tanh(t), axes, keepdims=keepdims))
    expected = np.tanh(x.astype(np.float64)).sum(axes, keepdims=keepdims)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6 * np.abs(x).sum() / 64)
    windows = re.findall(r"window={size=([\dx]+)", text)
    assert windows
    assert all(sum(n != "1" for n in size.split("x")) == 1 for size in windows)
