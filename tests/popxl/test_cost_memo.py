"""Memoized costs of segments that were traced before."""

from __future__ import annotations

from unittest import mock

import jax
import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.plan import cost_memo
from popxl.plan.segment_cost import trace_cost


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_memo, "_memo", {})


def program(label: str = "layer", width: int = 8, layers: int = 2) -> popxl.Ir:
    """Segments that are alike, apart by transfers."""
    ir = popxl.Ir()
    with ir.main_graph:
        weights = popxl.remote_buffer((width, width), popxl.float32, layers)
        x = popxl.variable(np.ones((4, width), np.float32))
        for i in range(layers):
            w = ops.remote_load(weights, i)
            with popxl.plan.part(label):
                x = ops.gelu(x @ w)
            ops.remote_store(weights, i, w + 1)
        ops.host_store(popxl.d2h_stream(x.shape, x.dtype), x)
    return ir


def traced(ir: popxl.Ir, target: str = "gpu 9.0") -> tuple[popxl.plan.TracedProgram, int]:
    """And how many segments were traced for it."""
    with mock.patch.object(cost_memo, "trace_cost", side_effect=trace_cost) as counted:
        return popxl.plan.trace_program(ir, target), counted.call_count


def test_equal_segments_are_traced_once_and_do_the_same() -> None:
    first, count = traced(program(layers=6))
    again, none = traced(program(layers=6))
    assert (count < len(first.schedule.segments), none) == (True, 0)
    for one in (first, again):
        for segment, work in one.segment_costs.items():
            anew = trace_cost(segment)
            assert (work.parts, work.temporaries) == (anew.parts, anew.temporaries)


@pytest.mark.parametrize(
    "other",
    [
        lambda: traced(program("another label")),
        lambda: traced(program(width=16)),
        lambda: traced(program(), "cpu"),
        lambda: traced(program(), "gpu 8.0"),
    ],
)
def test_what_differs_is_traced(other) -> None:
    _, count = traced(program())
    assert other()[1] == count


def test_so_does_a_setting_of_jax() -> None:
    _, count = traced(program())
    with jax.default_matmul_precision("tensorfloat32"):
        assert traced(program())[1] == count


def test_parts_have_their_own_work() -> None:
    plans = [popxl.plan.plan_of(program(label)) for label in ("a", "b")]
    assert ["a" in [p.name for p in plan.parts] for plan in plans] == [True, False]


def test_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_memo, "_MAX_SEGMENTS", 1)
    _, count = traced(program())
    assert len(cost_memo._memo) == 1
    assert count > 1
