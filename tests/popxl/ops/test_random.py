"""Random ops: reproducible, independent, of the right distribution; dropout's masks and gradient.

Bounds on statistics are 5 standard deviations, and the seeds are fixed.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.transforms import autodiff
from tests.popxl.ops.harness import compile_quickly, evaluate

SEED, OTHER = np.array([7, 11], np.uint32), np.array([7, 12], np.uint32)
COUNT = 40_000


@pytest.fixture(autouse=True)
def quickly() -> None:
    compile_quickly()


def test_uniform_has_the_moments_of_its_range() -> None:
    (x,) = evaluate(lambda s: ops.random_uniform(s, (200, 200), -1.0, 3.0), SEED)
    assert x.shape == (200, 200)
    assert x.dtype == np.float32
    assert x.min() >= -1.0
    assert x.max() < 3.0
    sd = 4 / np.sqrt(12)
    assert abs(x.mean() - 1.0) < 5 * sd / np.sqrt(COUNT)
    assert abs(x.std() - sd) < 0.02
    assert len(np.unique(x)) > 0.99 * COUNT


def test_normal_has_mean_and_deviation() -> None:
    (x,) = evaluate(lambda s: ops.random_normal(s, (200, 200), 2.0, 0.5, popxl.float16), SEED)
    assert x.dtype == np.float16
    wide = x.astype(np.float64)
    assert abs(wide.mean() - 2.0) < 5 * 0.5 / np.sqrt(COUNT)
    assert abs(wide.std() - 0.5) < 0.01
    beyond = np.abs(wide - 2.0) > 2 * 0.5
    assert abs(beyond.mean() - 0.0455) < 5 * np.sqrt(0.0455 / COUNT)


def test_equal_seeds_give_equal_numbers_and_others_independent_ones() -> None:
    def build(a, b):
        return [ops.random_normal(s, (200, 200)) for s in (a, a, b)]

    first, again, other = evaluate(build, SEED, OTHER)
    np.testing.assert_array_equal(first, again)
    correlation = np.corrcoef(first.ravel(), other.ravel())[0, 1]
    assert abs(correlation) < 5 / np.sqrt(COUNT)


def test_split_and_created_seeds_differ_from_each_other_and_from_their_parent() -> None:
    def build(s, step):
        children = ops.split_random_seed(s, 3)
        return [*children, *ops.split_random_seed(children[0]),
                ops.create_random_seed(s, step), ops.create_random_seed(s, step + 1),
                ops.create_random_seed(s, step)]  # fmt: skip

    seeds = evaluate(build, SEED, np.array([3], np.int32))
    assert all(s.dtype == np.uint32 and s.shape == (2,) for s in seeds)
    np.testing.assert_array_equal(seeds[5], seeds[7])
    assert len({tuple(s) for s in [SEED, *seeds]}) == len(seeds)  # all but the repeated one


@cache
def _dropout(p: float, dtype: str = "float32") -> tuple[np.ndarray, ...]:
    """Input, output, gradient of a sum weighted by `weights`, and the weights."""
    ir = popxl.Ir()
    rng = np.random.default_rng(3)
    x, dy = (rng.normal(1, 1, (100, 100)).astype(dtype) for _ in range(2))

    def graph_fn(t, seed):
        return ops.dropout(t, seed, p)

    with ir.main_graph:
        xs = popxl.h2d_stream(x.shape, popxl.dtype.as_dtype(x.dtype))
        gs = popxl.h2d_stream(x.shape, popxl.dtype.as_dtype(x.dtype))
        t, seed, g = ops.host_load(xs), popxl.constant(SEED), ops.host_load(gs)
        graph = ir.create_graph(graph_fn, t, seed)
        info = autodiff(graph)
        site = ops.call_with_info(graph, t, seed)
        (dx,) = ops.call(info.graph, g, inputs_dict=info.inputs_dict(site))
        outs = [popxl.d2h_stream(x.shape, t.dtype) for _ in range(2)]
        ops.host_store(outs[0], site.outputs[0])
        ops.host_store(outs[1], dx)
    with popxl.Session(ir) as session:
        results = session.run({xs: x, gs: dy})
    return x, results[outs[0]], results[outs[1]], dy


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_keeps_and_scales(p: float) -> None:
    x, y, _, _ = _dropout(p)
    dropped = y == 0
    assert abs(dropped.mean() - p) < 5 * np.sqrt(p * (1 - p) / x.size)
    np.testing.assert_allclose(y[~dropped], x[~dropped] / (1 - p), rtol=1e-6)


def test_dropout_uses_the_same_mask_backwards() -> None:
    _, y, dx, dy = _dropout(0.1)
    np.testing.assert_allclose(dx, np.where(y == 0, 0, dy / 0.9), rtol=1e-6)


def test_dropout_mask_depends_on_the_seed_alone() -> None:
    _, wide, _, _ = _dropout(0.5)
    _, half, _, _ = _dropout(0.5, "float16")
    np.testing.assert_array_equal(wide == 0, half == 0)
    assert half.dtype == np.float16


def test_dropout_of_0_is_the_identity() -> None:
    x, y, dx, dy = _dropout(0.0)
    np.testing.assert_array_equal(x, y)
    np.testing.assert_array_equal(dx, dy)


def test_shaped_dropout_drops_whole_rows() -> None:
    ones = np.ones((400, 30), np.float32)
    (y,) = evaluate(lambda t, s: ops.shaped_dropout(t, s, (400, 1), 0.25), ones, SEED)
    assert (y == y[:, :1]).all()
    np.testing.assert_allclose(np.unique(y), [0, 1 / 0.75], rtol=1e-6)
    assert abs((y[:, 0] == 0).mean() - 0.25) < 5 * np.sqrt(0.25 * 0.75 / 400)


def test_axes_of_a_mask_are_not_correlated() -> None:
    (y,) = evaluate(lambda t, s: ops.dropout(t, s, 0.5), np.ones((300, 300), np.float32), SEED)
    kept = (y != 0).astype(float)
    for axis in (0, 1):
        assert abs(kept.mean(axis) - 0.5).max() < 5 * 0.5 / np.sqrt(300)
    neighbours = np.corrcoef(kept[:, 1:].ravel(), kept[:, :-1].ravel())[0, 1]
    assert abs(neighbours) < 5 / 300
