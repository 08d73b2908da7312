"""Errors while a program is written leave the program as it was."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl import ops
from popxl._analysis.verify import verify_ir
from popxl.errors import SpecError, popart_exception
from popxl.transforms import autodiff
from tests.popxl.programs import run_ir, store


class Stop(BaseException):
    """No `Exception`, as an interrupt is none."""


def _shift(x: popxl.TensorByRef, y: popxl.TensorByRef) -> popxl.Tensor:
    return x + y


class WrongGradient(addons.Module):
    def build(self, x):
        return x * 2.0

    def build_grad(self, dy):
        raise Stop


# ---- graphs -------------------------------------------------------------------------------------
def _interrupted(x: popxl.Tensor, called: popxl.Graph) -> None:
    def body(x):
        ops.call(called, x, x)
        popxl.constant(np.arange(2), popxl.int64, downcast=False) + 1  # sessions refuse 64 bits
        raise Stop

    popxl.gir().create_graph(body, x)


def _interrupted_inside(x: popxl.Tensor, called: popxl.Graph) -> None:
    popxl.gir().create_graph(lambda x: _interrupted(x, called), x)


def _branches(x: popxl.Tensor, called: popxl.Graph) -> None:
    def body(x):
        ops.conditional(popxl.constant(True), called, called, [x, x], [x, x])
        raise Stop

    popxl.gir().create_graph(body, x)


def _without_gradient(x: popxl.Tensor, called: popxl.Graph) -> None:
    stream = popxl.h2d_stream(x.shape, x.dtype)
    loading = popxl.gir().create_graph(lambda x: x * ops.host_load(stream), x)
    graph = popxl.gir().create_graph(lambda x: ops.repeat(loading, 2, x)[0], x)
    with pytest.raises(popart_exception, match="cannot be differentiated"):
        autodiff(graph)
    raise Stop


def _written_by_hand(x: popxl.Tensor, called: popxl.Graph) -> None:
    _, graph = WrongGradient().create_graph(x)
    addons.autodiff(graph)


BROKEN: dict[str, Callable] = {
    "interrupted": _interrupted,
    "interrupted inside another": _interrupted_inside,
    "branches": _branches,
    "autodiff": _without_gradient,
    "build_grad": _written_by_hand,
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_graph_whose_making_raises_is_none_of_the_program(broken):
    ir = popxl.Ir()
    with ir.main_graph:
        x = popxl.variable(np.arange(2, dtype=np.float32))
        called = ir.create_graph(_shift, x, x)
        before = list(ir._graphs)
        with pytest.raises(Stop):
            BROKEN[broken](x, called)
        left = [graph for graph in ir._graphs if graph not in before]
        assert all(graph.outputs for graph in left), [str(graph) for graph in left]
        autodiff(called)  # may gain outputs: no conditional runs it
        with called:  # may change what it is given: nobody gives it the same twice
            ops.add_(*called.inputs)
        result = store(ops.call(called, x, x * 2.0)[0])
    verify_ir(ir)
    with popxl.Session(ir) as session:
        np.testing.assert_array_equal(session.run()[result], [0, 3])


def test_a_branch_that_cannot_gain_outputs_is_left_alone(ir):
    x = popxl.variable(np.arange(2, dtype=np.float32))
    graph = ir.create_graph(lambda x: ops.sin(x) * ops.exp(x), x)
    result = store(ops.conditional(popxl.constant(True), graph, graph, [x], [x])[0])
    before = str(ir)
    with pytest.raises(SpecError, match="is a branch of a conditional"):
        autodiff(graph)
    assert str(ir) == before
    x64 = np.arange(2.0)
    np.testing.assert_allclose(run_ir(ir, [result])[0], np.sin(x64) * np.exp(x64), rtol=1e-6)


def test_a_call_that_may_not_change_what_it_is_given_does_not(ir):
    x = popxl.variable(np.arange(2, dtype=np.float32))

    def change(x, y):
        ops.add_(x, y)
        ops.add_(y, x)

    info = ops.call_with_info(ir.create_graph(change, x, x), x, x)
    with pytest.raises(ValueError, match="as two references"):
        info.set_parent_input_modified(x)
    result = store(x)
    np.testing.assert_array_equal(run_ir(ir, [result])[0], [0, 1])


# ---- name scopes --------------------------------------------------------------------------------
def test_a_scope_of_one_program_is_none_of_another():
    one, other = popxl.Ir(), popxl.Ir()
    context = popxl.context.get_current_context()
    with one.main_graph:
        context.push_name_scope("left_open")
        assert popxl.variable(1.0, name="x").name == "left_open/x"
    with other.main_graph:
        assert popxl.variable(1.0, name="x").name == "x"
    with one.main_graph:
        assert context.pop_name_scope() == "left_open"
        assert popxl.variable(1.0, name="x").name == "x"


def test_a_scope_outside_any_graph_names_nothing():
    with popxl.name_scope("outside"), popxl.Ir().main_graph:
        assert popxl.variable(1.0, name="x").name == "x"
