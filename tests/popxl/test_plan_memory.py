"""Plans follow what XLA leaves out and what it writes in place, by numbers that can be counted."""

from __future__ import annotations

import numpy as np
import pytest

import popxl
from popxl import Tensor, ops
from popxl.plan import Plan, plan_of

ROWS, ROW = 64, 1024
CACHE = ROWS * ROW * 4


def to_host(value: Tensor) -> None:
    ops.host_store(popxl.d2h_stream(value.shape, value.dtype), value)


def test_what_differs_in_a_number_is_computed_twice() -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        x = popxl.variable(np.zeros((32, 32), np.float32))
        to_host((x * 2.0) @ x + (x * 3.0) @ x)
    assert plan_of(ir).flops == 2 * (2 * 32**3)


@pytest.mark.parametrize("reads_all", [False, True])
def test_a_loop_overwrites_what_it_carries(reads_all: bool) -> None:
    """A row of a cache in a branch; twice the cache if the old one is read later, as in XLA."""
    ir = popxl.Ir()
    with ir.main_graph:
        go = popxl.variable(True, popxl.bool)
        cache = popxl.variable(np.zeros((ROWS, ROW), np.float32))
        row = popxl.variable(np.ones((1, ROW), np.float32))

        def update(cache: Tensor, at: Tensor, row: Tensor) -> Tensor:
            return ops.dynamic_update(cache, at, row, axes=[0], sizes=[1], no_overlap=True)

        def step(at: Tensor, cache: Tensor, go: Tensor, row: Tensor) -> list[Tensor]:
            new = ir.create_graph(update, cache, at, row)
            same = ir.create_graph(lambda cache: cache, cache)
            (chosen,) = ops.conditional(go, new, same, [cache, at, row], [cache])
            last = ops.slice(chosen, ROWS - 1, ROWS, axis=0)
            if reads_all:
                last = last + ops.sum(ops.tanh(cache) * chosen)
            return [at + 1, chosen, go, last]

        at = popxl.constant(np.zeros(1), popxl.uint32)
        _, filled, _, _ = ops.repeat(
            ir.create_graph(step, at, cache, go, row), 8, at, cache, go, row
        )
        to_host(ops.sum(filled))
    planned, given = memory(ir)
    assert planned.temporaries == pytest.approx((1 + reads_all) * CACHE, rel=0.1)
    assert planned.temporaries == pytest.approx(given, rel=0.05)


def test_what_a_loop_computes_in_advance_stays_as_long_as_the_loop() -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        x = popxl.variable(np.zeros((ROWS, ROW), np.float32))
        w = popxl.variable(np.zeros((ROW, ROW), np.float32))

        def step(a: Tensor, x: Tensor, w: Tensor) -> Tensor:
            return ops.tanh(a @ w) + ops.tanh(x @ w)

        (y,) = ops.repeat(ir.create_graph(step, x, x, w), 8, x, x, w)
        to_host(ops.sum(y))
    planned, given = memory(ir)
    # What is carried, the product that is the same, and the one that is not.
    assert planned.temporaries == pytest.approx(3 * CACHE, rel=0.1)
    assert planned.temporaries == pytest.approx(given, rel=0.05)


def memory(ir: popxl.Ir) -> tuple[Plan, int]:
    """The plan, and the bytes of temporaries in the compiled program."""
    session = popxl.Session(ir, "cpu")
    return session.plan(), session.memory_use().temporaries
