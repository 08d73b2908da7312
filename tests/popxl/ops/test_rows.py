"""Rows added by index, as GPUs do it, compared with NumPy in float64."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import popxl
from popxl import ops
from popxl._ir.op_registry import registry
from popxl.ops._reductions import tracing_platform
from popxl.ops._scatter_add import scatter_add
from tests.popxl.ops.harness import compile_quickly

COUNTS = st.sampled_from([1, 2, 1000, 1024, 1025, 128 * 128, 40000, 150000])


def added(onto, where, rows):
    with tracing_platform("gpu 9.0"):
        return jax.jit(scatter_add)(onto, where, rows)


CASES = given(
    count=COUNTS,
    size=st.sampled_from([1, 7, 5000]),
    features=st.sampled_from([(), (3, 2)]),
    half=st.booleans(),
    seed=st.integers(0, 2**31),
)


@settings(deadline=None, max_examples=2)  # each shape is compiled
@CASES
@example(count=40000, size=7, features=(3, 2), half=True, seed=0)
@example(count=1025, size=5000, features=(), half=False, seed=1)
def test_sums_are_those_of_float64(count, size, features, half, seed) -> None:
    compile_quickly()
    check(count, size, features, half, seed)


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@CASES
def test_more_sums_are_those_of_float64(count, size, features, half, seed) -> None:
    check(count, size, features, half, seed)


def check(count, size, features, half, seed) -> None:
    """Checks indices that repeat, span many blocks or are dropped, with some rows equal."""
    rng = np.random.default_rng(seed)
    where = rng.integers(0, size + 1, count).astype(np.int32)
    where[: count // 3] = where[0]
    onto, rows = (rng.normal(size=(n, *features)).astype(np.float32) for n in (size, count))
    if half:
        rows = np.asarray(rows, jnp.bfloat16)
    expected = onto.astype(np.float64)
    there = where < size
    np.add.at(expected, where[there], rows[there].astype(np.float64))
    largest = np.bincount(where).max() + 1
    np.testing.assert_allclose(added(onto, where, rows), expected, rtol=0, atol=4e-7 * largest * 5)


def test_indices_may_have_any_shape_and_rows_no_elements() -> None:
    onto, where = np.zeros((4, 3), np.float32), np.array([[0, 3], [4, 0]], np.int32)
    out = added(onto, where, np.ones((2, 2, 3), np.float32))
    assert out[:, 0].tolist() == [2, 0, 0, 1]
    assert added(np.zeros((4, 0), np.float32), where, np.ones((2, 2, 0), np.float32)).size == 0
    assert not np.any(added(onto, where[:0], np.ones((0, 2, 3), np.float32)))


@pytest.mark.parametrize("count", [10, 2000])
def test_what_is_left_out_may_be_anything(count) -> None:
    where, rows = np.zeros(count, np.uint32), np.ones((count, 2), np.float32)
    where[3], rows[3] = 4, np.nan
    assert added(np.zeros((4, 2), np.float32), where, rows)[0].tolist() == [count - 1] * 2


def test_integers_are_added_as_they_are() -> None:
    where = np.array([1, 1, 2], np.int32)
    assert added(np.zeros(2, np.int32), where, np.full(3, 2**30, np.int32)).tolist() == [
        0,
        -(2**31),
    ]


def test_only_indices_are_sorted_and_no_sum_depends_on_the_order_of_threads() -> None:
    """A scatter whose indices can be equal would be sorted by XLA with all its elements."""
    shapes = [((50, 8), jnp.float32), ((9000,), jnp.int32), ((9000, 8), jnp.bfloat16)]
    with tracing_platform("gpu 9.0"):
        closed = jax.make_jaxpr(scatter_add)(*[jax.ShapeDtypeStruct(*each) for each in shapes])
    found = list(_all(closed.jaxpr))
    sorts = [e for e in found if e.primitive.name == "sort"]
    assert [v.aval.shape for e in sorts for v in e.invars] == [(9000,), (9000,)]
    scatters = [e for e in found if e.primitive.name == "scatter-add"]
    assert len(scatters) == 2, "of blocks, and of what goes on from one to the next"
    assert all(e.params["unique_indices"] for e in scatters)


GRADIENTS = given(
    count=st.sampled_from([1, 40, 1030, 3000]),
    zero_oor=st.booleans(),
    half=st.booleans(),
    seed=st.integers(0, 2**31),
)


@settings(deadline=None, max_examples=2)  # each is compiled
@GRADIENTS
@example(count=1030, zero_oor=True, half=True, seed=0)
@example(count=3000, zero_oor=False, half=False, seed=1)
@example(count=1, zero_oor=True, half=False, seed=2)
def test_gradients_are_added_to_rows_as_if_the_whole_table_were(
    count, zero_oor, half, seed
) -> None:
    compile_quickly()
    check_gradients(count, zero_oor, half, seed)


@pytest.mark.slow
@settings(deadline=None, max_examples=30)
@GRADIENTS
def test_more_gradients_are_added_to_rows(count, zero_oor, half, seed) -> None:
    check_gradients(count, zero_oor, half, seed)


def check_gradients(count, zero_oor, half, seed) -> None:
    """Bit for bit, where indices repeat, some are out of range, and one of their rows is NaN."""
    rng = np.random.default_rng(seed)
    assert callable(ops.gather)  # whose module defines the op of its gradient
    grad, dtype = registry()["gather_grad"], jnp.bfloat16 if half else np.float32
    shape, attrs = (4000, 3), {"axis": 0, "zero_oor": zero_oor}
    indices = rng.integers(-5 if zero_oor else 0, 4010 if zero_oor else 4000, count)
    indices = np.where(rng.random(count) < 0.5, indices, indices[0]).astype(np.int32)
    t, dy = rng.normal(size=shape).astype(np.float32), rng.normal(size=(count, 3)).astype(dtype)
    if zero_oor and not 0 <= indices[-1] < 4000:
        dy[-1] = np.nan

    with tracing_platform("gpu 9.0"):
        onto = jax.jit(partial(grad.add_to, shape=shape, **attrs))(t, dy, indices)
        whole = jax.jit(partial(grad.lower, shape=shape, **attrs))(dy, indices)
    np.testing.assert_array_equal(np.asarray(onto), t + np.asarray(whole).astype(np.float32))


def test_the_gradient_of_a_large_table_takes_memory_for_its_rows_alone() -> None:
    """Added to an accumulator, as gradient accumulation does."""
    ir = popxl.Ir()
    with ir.main_graph:
        table = popxl.variable(np.zeros((5000, 64)), popxl.bfloat16, name="table")
        total = popxl.variable(np.zeros((5000, 64), np.float32), name="total")
        tokens = popxl.constant(np.arange(20), popxl.int32)
        graph = ir.create_graph(ops.gather, table, tokens)
        grad = popxl.transforms.autodiff(graph, grads_required=[graph.inputs[0]]).graph
        dy = popxl.constant(np.ones((20, 64)), popxl.bfloat16)
        (gradient,) = ops.call(grad, dy, tokens)
        ops.var_updates.accumulate_(total, gradient)
    costs = popxl.plan.trace_program(ir, "gpu 9.0").segment_costs
    assert sum(work.temporaries for work in costs.values()) < 2**17


def _all(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
                yield from _all(getattr(value, "jaxpr", value))


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_elsewhere_it_is_one_scatter(platform) -> None:
    onto, where = np.zeros((4, 3), np.float32), np.array([0, 3], np.int32)
    with tracing_platform(platform):
        closed = jax.make_jaxpr(scatter_add)(onto, where, np.ones((2, 3), np.float32))
    names = [e.primitive.name for e in _all(closed.jaxpr)]
    assert (names.count("scatter-add"), names.count("sort")) == (1, 0)
