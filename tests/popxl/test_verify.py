"""The verifier finds broken graphs and names the op."""

from __future__ import annotations

import numpy as np
import pytest

import popxl
from popxl import ops
from popxl._analysis.verify import VerificationError, verify_graph, verify_ir
from popxl._ir.op import Op
from popxl._ir.op_registry import registry
from popxl.errors import popart_exception
from popxl.transforms import autodiff
from tests.popxl.programs import f32

X = f32(2, 3)


@pytest.fixture
def graph():
    """A sound graph of three ops, a call and a repeat."""
    ir = popxl.Ir()
    with ir.main_graph:
        x = popxl.variable(X)
        inner = ir.create_graph(lambda a: ops.tanh(a), x)

        def fn(a, b):
            (c,) = ops.call(inner, ops.sin(a))
            (d,) = ops.repeat(inner, 2, c)
            return ops.add(c, b), d

        made = ir.create_graph(fn, x, x)
    verify_ir(ir)
    return made


def _op(graph: popxl.Graph, name: str) -> Op:
    return next(op for op in graph._ops if op.name == name)


def _defined_later(graph):
    graph._ops.append(graph._ops.pop(0))
    return "call"


def _defined_nowhere(graph):
    graph._ops.remove(_op(graph, "sin"))
    return "call"


def _defined_twice(graph):
    graph._ops.append(_op(graph, "sin"))
    return "sin"


def _wrong_producer(graph):
    _op(graph, "sin").outputs[0]._producer = _op(graph, "add")
    return "sin"


def _wrong_shape(graph):
    out = _op(graph, "add").outputs[0]
    out._spec = popxl.TensorSpec((7,), out.dtype)
    return "add"


def _wrong_dtype(graph):
    out = _op(graph, "sin").outputs[0]
    out._spec = popxl.TensorSpec(out.shape, popxl.float16)
    return "sin"


def _of_another_graph(graph):
    op = _op(graph, "sin")
    op.inputs[0] = graph.ir.main_graph.variables[0]
    return "sin"


def _listed_elsewhere(graph):
    _op(graph, "sin").graph = graph.ir.main_graph
    return "sin"


def _call_with_too_few_inputs(graph):
    _op(graph, "call").inputs.clear()
    return "call"


def _repeat_with_too_many_outputs(graph):
    op = _op(graph, "repeat")
    op.outputs.append(popxl.Tensor._make(graph, op.outputs[0].spec, "extra", producer=op))
    return "repeat"


def _condition_of_wrong_dtype(graph):
    inner = _op(graph, "call").attrs["graph"]
    a = graph._inputs[0]
    attrs = {"then": inner, "otherwise": inner}
    op = Op(registry()["conditional"], graph, [a, a, a], attrs)
    op.outputs.append(popxl.Tensor._make(graph, a.spec, "out", producer=op))
    graph._ops.append(op)
    return "conditional"


def _branch_with_wrong_input(graph):
    inner = _op(graph, "call").attrs["graph"]
    with graph:
        cond, wide = popxl.constant(True), popxl.constant(np.ones(9, np.float32))
    a = graph._inputs[0]
    attrs = {"then": inner, "otherwise": inner}
    op = Op(registry()["conditional"], graph, [cond, a, wide], attrs)
    op.outputs.append(popxl.Tensor._make(graph, a.spec, "out", producer=op))
    graph._ops.append(op)
    return "conditional"


def _view_without_rule(graph):
    _op(graph, "sin").view = True
    return "sin"


def _in_place_of_nothing(graph):
    _op(graph, "sin").inplace = 3
    return "sin"


BREAKS = [
    _defined_later, _defined_nowhere, _defined_twice, _wrong_producer, _wrong_shape, _wrong_dtype,
    _of_another_graph, _listed_elsewhere, _call_with_too_few_inputs,
    _repeat_with_too_many_outputs, _condition_of_wrong_dtype, _branch_with_wrong_input,
    _view_without_rule, _in_place_of_nothing,
]  # fmt: skip


@pytest.mark.parametrize("break_it", BREAKS)
def test_a_broken_graph_is_found_and_the_op_named(graph, break_it):
    name = break_it(graph)
    with pytest.raises(popart_exception, match=name) as error:
        verify_graph(graph)
    assert __file__ in str(error.value)


def test_an_output_that_nothing_defines_is_found(graph):
    graph._outputs.append(popxl.Tensor._make(graph, graph.inputs[0].spec, "ghost"))
    with pytest.raises(VerificationError, match="returns %ghost, which nothing defines"):
        verify_graph(graph)


def test_sessions_and_transforms_verify_when_asked(graph, monkeypatch):
    _wrong_shape(graph)
    popxl.Session(graph.ir)
    monkeypatch.setenv("POPXL_VERIFY", "1")
    with pytest.raises(VerificationError):
        popxl.Session(graph.ir)
    other = graph.ir.main_graph.called_graphs
    assert other == ()
    inner = _op(graph, "call").attrs["graph"]
    with pytest.raises(VerificationError):
        autodiff(inner)
    monkeypatch.setenv("POPXL_VERIFY", "0")
    autodiff(inner)


# ---- errors while writing -----------------------------------------------------------------------
def _line(text: str) -> int:
    with open(__file__) as file:
        return next(i for i, line in enumerate(file, 1) if text in line and "_line(" not in line)


def test_an_op_that_does_not_fit_names_itself_its_inputs_and_the_user_s_line():
    ir = popxl.Ir()
    with ir.main_graph:
        a = popxl.variable(np.ones((2, 3), np.float32), name="a")
        b = popxl.variable(np.ones((4, 5), np.float32), name="b")
        with pytest.raises(
            ValueError, match=r"matmul\(a: float32\[2, 3\], b: float32\[4, 5\]\)"
        ) as e:
            ops.matmul(a, b)  # this is the user's line
    assert f"{__file__}:{_line('this is the user' + chr(39) + 's line')}" in str(e.value)


def test_mixed_dtypes_say_how_to_convert():
    ir = popxl.Ir()
    with ir.main_graph:
        a, b = popxl.variable(np.ones(2, np.float32)), popxl.variable(np.ones(2, np.float16))
        with pytest.raises(TypeError, match="no implicit conversion, use ops.cast"):
            a + b


def test_an_in_place_result_must_fit():
    ir = popxl.Ir()
    with ir.main_graph:
        a = popxl.variable(np.ones(3, np.float32), name="small")
        b = popxl.variable(np.ones((2, 3), np.float32))
        with pytest.raises(
            ValueError, match=r"float32\[2, 3\] cannot be written in place to 'small'"
        ):
            ops.add_(a, b)


def test_ops_take_tensors():
    with popxl.Ir().main_graph, pytest.raises(TypeError, match="takes tensors, but got 3"):
        ops.sin(3)
