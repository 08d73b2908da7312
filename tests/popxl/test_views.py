"""Writing through views: the owner changes, and so do all other views of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

import popxl
from popxl import ops
from tests.popxl.programs import f32, graph_of, run

pytestmark = pytest.mark.usefixtures("compiled_quickly")

X = f32(4, 6)


# How a view is taken in popxl and in numpy.
VIEWS: dict[str, tuple[Callable[[Any], Any], Callable[[np.ndarray], np.ndarray]]] = {
    "slice": (lambda t: ops.slice_(t, 1, 3), lambda a: a[1:3]),
    "slice of an inner axis": (lambda t: ops.slice_(t, 2, 5, axis=1), lambda a: a[:, 2:5]),
    "slice of both axes": (lambda t: ops.slice_(t, [1, 2], [3, 5]), lambda a: a[1:3, 2:5]),
    "steps": (lambda t: ops.slice_(t, [0, 5], [4, 0], [2, -2]), lambda a: a[::2, 5:0:-2]),
    "step alone": (lambda t: ops.slice_(t, step=2, axis=1), lambda a: a[:, ::2]),
    "reversed": (lambda t: ops.slice_(t, step=-1, axis=1), lambda a: a[:, ::-1]),
    "reversed steps": (lambda t: ops.slice_(t, 3, None, -2), lambda a: a[3::-2]),
    "reshape": (lambda t: ops.reshape_(t, (2, 12)), lambda a: a.reshape(2, 12)),
    "reshape to what is left": (lambda t: ops.reshape_(t, (3, -1)), lambda a: a.reshape(3, 8)),
    "transpose": (lambda t: ops.transpose_(t), lambda a: a.T),
    "flatten": (lambda t: ops.flatten_(t), lambda a: a.reshape(-1)),
    "detach": (lambda t: ops.detach_(t), lambda a: a),
    "reshape of reshape": (lambda t: t.reshape_((24,)).reshape_((3, 8)), lambda a: a.reshape(3, 8)),
    "slice of transpose": (lambda t: ops.slice_(t.T_, 1, 4), lambda a: a.T[1:4]),
    "slice of slice": (
        lambda t: ops.slice_(ops.slice_(t, 1, 4), 1, 2), lambda a: a[1:4][1:2],
    ),
    "slice of reshape of transpose": (
        lambda t: ops.slice_(ops.reshape_(t.T_, (2, 12)), 3, 7, axis=1),
        lambda a: a.T.reshape(2, 12)[:, 3:7],
    ),
    "row of slice of transpose": (
        lambda t: ops.slice_(ops.slice_(t.T_, 1, 4), 0, 2, axis=1).flatten_(),
        lambda a: a.T[1:4][:, :2].reshape(-1),
    ),
}  # fmt: skip


def _raised(numpy_view) -> np.ndarray:
    """X with 10 added to the elements of a view, found by their values, which all differ."""
    return np.where(np.isin(X, numpy_view(X)), X + 10, X)


@cache
def written() -> dict[str, list[np.ndarray]]:
    """Owner and view after a write to the view, and a view after a write to its owner."""

    def build(x):
        found = []
        for take, _ in VIEWS.values():
            owner, other = ops.identity(x), ops.identity(x)
            view, seen = take(owner), take(other)
            view += 10.0
            other += 10.0
            found += [owner * 1.0, view, seen * 1.0]
        return found

    found = iter(run(build, X))
    return {name: [next(found) for _ in range(3)] for name in VIEWS}


@pytest.mark.parametrize("name", VIEWS)
def test_a_write_to_a_view_reaches_its_owner(name):
    _, numpy_view = VIEWS[name]
    owner, view, _ = written()[name]
    np.testing.assert_allclose(owner, _raised(numpy_view), rtol=1e-6)
    np.testing.assert_allclose(view, numpy_view(X) + 10, rtol=1e-6)


@pytest.mark.parametrize("name", VIEWS)
def test_a_write_to_the_owner_is_seen_through_the_view(name):
    _, numpy_view = VIEWS[name]
    np.testing.assert_allclose(written()[name][2], numpy_view(X + 10), rtol=1e-6)


def test_a_flattened_slice_of_a_transposed_slice_writes_through_every_step():
    def build(x):
        owner = ops.identity(x)
        view = VIEWS["row of slice of transpose"][0](owner)
        ops.var_updates.copy_var_update_(view, popxl.constant(np.arange(6, dtype=np.float32)))
        return owner * 1.0

    expected = X.copy()
    expected.T[1:4][:, 0:2] = np.arange(6).reshape(3, 2)
    np.testing.assert_array_equal(run(build, X)[0], expected)


def test_writes_are_seen_in_program_order():
    def build(x):
        owner = ops.identity(x)
        rows, columns = ops.slice_(owner, 0, 2), ops.slice_(owner, 0, 3, axis=1)
        before = columns * 1.0
        rows += 1.0
        between = columns * 1.0
        columns += rows[0, 0]
        return before, between, owner * 1.0

    owner = X.copy()
    before = owner[:, :3].copy()
    owner[:2] += 1
    between = owner[:, :3].copy()
    owner[:, :3] += owner[0, 0].copy()
    for a, b in zip(run(build, X), (before, between, owner), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_a_concatenation_can_be_a_view_of_all_its_parts():
    def build(x):
        a, b = ops.slice(x, 0, 1), ops.slice(x, 1, 4)
        joined = ops.concat_([a, b])
        joined += 5.0
        return a * 1.0, b * 1.0

    a, b = run(build, X)
    np.testing.assert_allclose(a, X[:1] + 5, rtol=1e-6)
    np.testing.assert_allclose(b, X[1:] + 5, rtol=1e-6)


def test_a_view_of_a_concatenation_writes_to_all_its_parts():
    def build(a, b):
        a, b = ops.identity(a), ops.identity(b)
        joined = ops.concat_([a, b], 1)
        part = ops.slice_(joined, 4, 8, axis=1)
        part += 10.0
        return a * 1.0, b * 1.0, joined * 1.0

    expected = np.concatenate([X, -X], 1)
    expected[:, 4:8] += 10
    wanted = expected[:, :6], expected[:, 6:], expected
    for ours, theirs in zip(run(build, X, -X), wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_an_update_with_a_shifted_part_of_itself():
    """openxla/xla#49176: the CPU compiler read its own output here, [1 1 1 1]."""

    def build(t):
        owner = ops.identity(t)
        ops.var_updates.copy_var_update_(ops.slice_(owner, 1, 4), ops.slice(owner, 0, 3))
        return ops.reshape(owner, (2, 2))

    def dynamic(t, index):
        return ops.reshape(ops.dynamic_update(t, index, ops.slice(t, 0, 3), [0], [3], True), (2, 2))

    x = np.array([1, 2, 3, 4], np.float32)
    expected = np.array([[1, 1], [2, 3]], np.float32)
    np.testing.assert_array_equal(run(build, x)[0], expected)
    np.testing.assert_array_equal(run(dynamic, x, np.array([1], np.uint32))[0], expected)


def test_an_in_place_result_is_the_tensor_itself():
    def build(x):
        owner = ops.identity(x)
        result = ops.relu_(owner)
        result += 1.0
        return owner, result

    owner, result = run(build, X)
    np.testing.assert_array_equal(owner, result)
    np.testing.assert_allclose(owner, np.maximum(X, 0) + 1, rtol=1e-6)


def test_a_view_of_a_reference_in_a_called_graph_reaches_the_caller():
    def inner(x: popxl.TensorByRef):
        view = ops.slice_(x, 1, 3)
        view += 10.0

    def outer(x: popxl.TensorByRef):
        view = x.T_
        ops.call(graph_of(inner, view), view)

    def build(x):
        owner = ops.identity(x)
        ops.call(graph_of(outer, owner), owner)
        return owner * 1.0

    np.testing.assert_allclose(run(build, X)[0], _raised(lambda a: a.T[1:3]))


def test_a_view_can_be_passed_by_reference():
    def inner(x: popxl.TensorByRef):
        x += 10.0

    def build(x):
        owner = ops.identity(x)
        view = ops.slice_(owner, 1, 3)
        graph = graph_of(inner, view)
        ops.repeat(graph, 2, view)
        other = ops.slice_(owner, 0, 2)
        ops.call(graph, other)
        return owner * 1.0

    expected = X.copy()
    expected[1:3] += 20
    expected[0:2] += 10
    np.testing.assert_allclose(run(build, X)[0], expected, rtol=1e-6)


def test_a_view_of_a_value_does_not_reach_the_caller():
    def inner(x):
        view = ops.slice_(x, 1, 3)
        view += 10.0
        return x * 1.0

    def build(x):
        x = ops.identity(x)
        return *ops.call(graph_of(inner, x), x), x * 1.0

    inside, outside = run(build, X)
    np.testing.assert_allclose(inside, _raised(lambda a: a[1:3]), rtol=1e-6)
    np.testing.assert_array_equal(outside, X)


def test_a_graph_may_return_a_view_of_its_reference():
    def inner(x: popxl.TensorByRef):
        x += 1.0
        return x.T_

    def build(x):
        owner = ops.identity(x)
        (out,) = ops.call(graph_of(inner, owner), owner)
        out = ops.add_(out, popxl.constant(100.0))  # the result is a value of its own
        return out, owner * 1.0

    out, owner = run(build, X)
    np.testing.assert_allclose(out, X.T + 101, rtol=1e-6)
    np.testing.assert_allclose(owner, X + 1, rtol=1e-6)


def test_a_view_of_a_variable_writes_to_the_variable():
    ir = popxl.Ir(replication=2)
    with ir.main_graph:
        v = popxl.variable(X)
        ops.var_updates.copy_var_update_(
            ops.slice_(v, 1, 2), popxl.constant(np.zeros((1, 6), np.float32))
        )
    with popxl.Session(ir) as session:
        session.run()
        expected = X.copy()
        expected[1] = 0
        np.testing.assert_array_equal(session.get_tensor_data(v), expected)


def test_loads_and_updates_go_through_views():
    ir = popxl.Ir()
    with ir.main_graph:
        buffer = popxl.remote_buffer((2, 6), popxl.float32, 1)
        popxl.remote_variable(np.full((2, 6), 7, np.float32), buffer)
        v = popxl.variable(X)
        ops.remote_load_(buffer, 0, ops.slice_(v, 2, 4))
        ops.dynamic_update_(
            v.T_, popxl.constant([1], popxl.uint32),
            popxl.constant(np.zeros((1, 4), np.float32)), [0], [1], False,
        )  # fmt: skip
    with popxl.Session(ir) as session:
        session.run()
        expected = X.copy()
        expected[2:4] = 7
        expected.T[1] = 0
        np.testing.assert_array_equal(session.get_tensor_data(v), expected)
