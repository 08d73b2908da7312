"""Views: what is written through one is read from its owner, and the other way round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import popxl
from popxl import ops
from tests.popxl.ops.harness import evaluate

X = np.arange(24, dtype=np.float32).reshape(4, 6)

VIEWS: dict[str, tuple[Callable[[Any], Any], Callable[[np.ndarray], np.ndarray]]] = {
    "reshape_": (lambda t: ops.reshape_(t, (3, -1)), lambda a: a.reshape(3, 8)),
    "flatten_": (ops.flatten_, lambda a: a.reshape(-1)),
    "transpose_": (ops.transpose_, lambda a: a.T),
    "slice_": (lambda t: ops.slice_(t, [1, 2], [3, 5]), lambda a: a[1:3, 2:5]),
    "slice_step": (lambda t: ops.slice_(t, step=2, axis=1), lambda a: a[:, ::2]),
    "slice_reversed": (lambda t: ops.slice_(t, step=-1, axis=1), lambda a: a[:, ::-1]),
    "slice_reversed_step": (lambda t: ops.slice_(t, 3, None, -2), lambda a: a[3::-2]),
    "detach_": (ops.detach_, lambda a: a),
    "chain": (
        lambda t: ops.slice_(ops.reshape_(ops.transpose_(t), (2, 12)), 3, 7, axis=1),
        lambda a: a.T.copy().reshape(2, 12)[:, 3:7],
    ),
}


def _written(view: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """X with 100 added to the elements of the view, found by their values, which are unique."""
    out = X.copy()
    out[np.isin(X, view(X))] += 100
    return out


@pytest.mark.parametrize("name", VIEWS)
def test_writes_reach_the_owner(name: str) -> None:
    make, view = VIEWS[name]

    def build(t):
        owner = ops.identity(t)
        part = make(owner)
        ops.add_(part, popxl.constant(100.0))
        return owner, part

    owner, part = evaluate(build, X)
    np.testing.assert_array_equal(owner, _written(view))
    np.testing.assert_array_equal(part, view(X) + 100)


@pytest.mark.parametrize("name", VIEWS)
def test_views_see_later_writes_of_the_owner(name: str) -> None:
    make, view = VIEWS[name]

    def build(t):
        owner = ops.identity(t)
        part = make(owner)
        ops.add_(owner, popxl.constant(100.0))
        return part

    np.testing.assert_array_equal(evaluate(build, X)[0], view(X) + 100)


def test_concat_writes_to_all_its_owners() -> None:
    def build(a, b):
        a, b = ops.identity(a), ops.identity(b)
        joined = ops.concat_([a, b], 1)
        ops.add_(ops.slice_(joined, 4, 8, axis=1), popxl.constant(100.0))
        return a, b, joined

    a, b, joined = evaluate(build, X, -X)
    want = np.concatenate([X, -X], 1)
    want[:, 4:8] += 100
    np.testing.assert_array_equal(joined, want)
    np.testing.assert_array_equal(a, want[:, :6])
    np.testing.assert_array_equal(b, want[:, 6:])


def test_an_update_with_a_shifted_part_of_itself() -> None:
    """openxla/xla#49176: the CPU compiler read its own output here, [1 1 1 1]."""

    def build(t):
        owner = ops.identity(t)
        ops.var_updates.copy_var_update_(ops.slice_(owner, 1, 4), ops.slice(owner, 0, 3))
        return ops.reshape(owner, (2, 2))

    def dynamic(t, index):
        return ops.reshape(ops.dynamic_update(t, index, ops.slice(t, 0, 3), [0], [3], True), (2, 2))

    x = np.array([1, 2, 3, 4], np.float32)
    want = np.array([[1, 1], [2, 3]], np.float32)
    np.testing.assert_array_equal(evaluate(build, x)[0], want)
    np.testing.assert_array_equal(evaluate(dynamic, x, np.array([1], np.uint32))[0], want)
