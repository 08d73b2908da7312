"""Accumulators of integers, of mixed dtypes and of scalars against numpy; what updaters report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.ops import var_updates as up
from tests.popxl.programs import run

pytestmark = pytest.mark.usefixtures("compiled_quickly")

INT, FLOAT, HALF = np.int32, np.float32, np.float16

# name, update, reference
UPDATES: list[tuple[str, Callable[..., Any], Callable[..., Any]]] = [
    ("accumulate", up.accumulate_, lambda t, x: t + x),
    ("with a factor", lambda t, x: up.accumulate_(t, x, 3), lambda t, x: t + 3 * x),
    ("square", up.accumulate_square_, lambda t, x: t + x * x),
    ("maximum", up.accumulate_maximum_, np.maximum),
    ("scale", lambda t, x: up.accumulator_scale_(t, 2), lambda t, x: 2 * t),
    ("zero", lambda t, x: up.accumulator_zero_(t), lambda t, x: 0 * t),
]
LARGE = 2**24 + 1  # no float32


@pytest.mark.parametrize(("t_dtype", "x_dtype"), [(INT, INT), (FLOAT, INT), (FLOAT, HALF),
                                                  (HALF, INT)])  # fmt: skip
@pytest.mark.parametrize("shape", [(), (3,)])
def test_accumulators_keep_their_dtype(t_dtype: Any, x_dtype: Any, shape: tuple[int, ...]) -> None:
    start = LARGE if t_dtype is INT else 5
    t = (start + np.arange(3)).astype(t_dtype)[: max(1, *shape, 1)].reshape(shape)
    x = np.array([4, -7, 2]).astype(x_dtype)[: max(1, *shape, 1)].reshape(shape)

    def build(a: popxl.Tensor, b: popxl.Tensor) -> list[popxl.Tensor]:
        return [update(ops.identity(a), b) for _, update, _ in UPDATES]

    found = run(build, t, x)
    for (name, _, reference), value in zip(UPDATES, found, strict=True):
        assert value.dtype == t_dtype, name
        wanted = reference(t.astype(np.float64), x.astype(np.float64))
        np.testing.assert_array_equal(value, wanted.astype(t_dtype), err_msg=name)


@pytest.mark.parametrize(("t_dtype", "x_dtype"), [(FLOAT, INT), (FLOAT, HALF), (HALF, FLOAT)])
def test_averages_keep_their_dtype(t_dtype: Any, x_dtype: Any) -> None:
    t, x = np.array([9, -4], t_dtype), np.array([3, 8], x_dtype)

    def build(a: popxl.Tensor, b: popxl.Tensor) -> list[popxl.Tensor]:
        average, square = up.accumulate_moving_average_, up.accumulate_moving_average_square_
        updates = (up.accumulate_mean_, 3.0), (average, 0.75), (square, 0.75)
        return [update(ops.identity(a), b, f) for update, f in updates]

    expected = (3 * t + x) / 4, 0.75 * t + 0.25 * x, 0.75 * t + 0.25 * x * x
    for value, wanted in zip(run(build, t, x), expected, strict=True):
        assert value.dtype == t_dtype
        np.testing.assert_allclose(value, wanted, rtol=1e-6)


@pytest.mark.parametrize("updater", [up.adam_updater, up.lamb_updater, up.adamax_updater])
@pytest.mark.parametrize("decay", ["number", "tensor", "tensor of 0"])
def test_weight_decay_without_a_weight_is_reported_first(updater: Any, decay: str) -> None:
    with popxl.Ir().main_graph:
        m, v = (popxl.variable(np.ones(3, FLOAT)) for _ in range(2))
        step = popxl.variable(np.float32(0))
        number = 0.0 if decay == "tensor of 0" else 0.1
        weight_decay = number if decay == "number" else popxl.constant(number)
        for time_step in (None, step):
            with pytest.raises(ValueError, match="weight_decay needs the weight"):
                updater(m, v, time_step=time_step, weight_decay=weight_decay, beta1=None)
        with pytest.raises(ValueError, match="beta|time_step"):  # a number 0 is no decay
            updater(m, v, time_step=step, weight_decay=0, beta1=None)
