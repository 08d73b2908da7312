"""Errors name the op, its tensors and the line of the program that wrote it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import popxl
from popxl import ops
from popxl._compile import platforms
from popxl._ir.op_registry import OpDef
from popxl.errors import SpecError, popart_exception
from popxl.ops._emit import emit

A = popxl.TensorSpec((2, 3), popxl.float32)
B = popxl.TensorSpec((3, 2), popxl.float32)
FLAG = popxl.TensorSpec((), popxl.bool)
OFFSET = popxl.TensorSpec((2,), popxl.int32)


def _raise(error: Exception) -> None:
    raise error


FAILING = {
    error.__class__.__name__: OpDef(
        f"failing_{error.__class__.__name__}",
        lambda x, error=error: _raise(error),
        infer=lambda spec: [spec],
    )
    for error in (
        NotImplementedError("no rule for this\nwith a second line"),
        KeyError("missing"),
        popart_exception("a sentence for the user"),
    )
}


def _fail(x: popxl.Tensor, error: str) -> popxl.Tensor:
    return emit(FAILING[error], [x], names=["y"])[0]


def _line_of(function: Callable[..., Any], text: str) -> str:
    """`file:line` of the line of `function` that contains `text`."""
    lines, first = inspect.getsourcelines(function)
    found = [first + i for i, line in enumerate(lines) if text in line]
    assert len(found) == 1
    return f"{__file__}:{found[0]}"


# ---- writing a program --------------------------------------------------------------------------
def build_product(a, b):
    return ops.matmul(a, a)


def build_sum_in_place(a, b):
    return ops.add_(ops.slice(a, 0, 1), a)


def build_call(a, b):
    graph = popxl.gir().create_graph(lambda x: ops.exp(x), A)
    return ops.call(graph, b)


def build_repeat(a, b):
    graph = popxl.gir().create_graph(ops.transpose, A)
    return ops.repeat(graph, 2, a)


def build_conditional(a, b):
    graphs = [popxl.gir().create_graph(ops.exp, spec) for spec in (A, B)]
    flag = popxl.constant(True)
    return ops.conditional(flag, *graphs, [a], [b])


def build_store(a, b):
    return ops.host_store(popxl.d2h_stream((2, 2), popxl.float32), a)


def build_offset(a, b):
    return ops.remote_load(popxl.remote_buffer((2,), popxl.float32, 2), a)


def build_ipus(a, b):
    return ops.add(ops.ipu_copy(a, 1, 0), ops.ipu_copy(a, 2, 0))


def build_foreign(a, b):
    return ops.add(a, popxl.gmg().get_tensor("v"))


@pytest.mark.parametrize(
    ("build", "line", "named"),
    [
        (build_product, "ops.matmul", ("matmul(", "a: float32[2, 3]")),
        (build_sum_in_place, "add_", ("add_(", "a: float32[2, 3]", "in place")),
        (build_call, "ops.call", ("call", "'x' of graph", "float32[3, 2]")),
        (build_repeat, "ops.repeat", ("repeat", "float32[3, 2]")),
        (build_conditional, "ops.conditional", ("conditional(", "a: float32[2, 3]")),
        (build_store, "host_store", ("host_store", "a'", "float32[2, 2]")),
        (build_offset, "remote_load", ("offset", "a'", "float32[2, 3]")),
        (build_ipus, "ops.add", ("add", "is on IPU 1", "is on IPU 2")),
        (build_foreign, "ops.add", ("add", "'v' belongs to graph 'main'")),
    ],
)
def test_an_error_while_writing_names_op_tensors_and_line(build, line, named):
    ir = popxl.Ir()
    with ir.main_graph:
        popxl.variable(1.0, name="v")
    with pytest.raises(ValueError) as caught:
        ir.create_graph(build, A, B)
    message = str(caught.value)
    assert _line_of(build, line) in message
    assert not [text for text in named if text not in message], message


def test_mistakes_in_shapes_can_be_caught_under_each_of_their_names():
    for kind in (SpecError, ValueError, TypeError, popart_exception):
        with pytest.raises(kind, match="matmul"):
            popxl.Ir().create_graph(build_product, A, B)


def slice_it(a):
    return ops.slice(a, 0, 1, 0, axis=5)


def reshape_it(a):
    return a.reshape((4, 4))


def gather_it(a):
    return ops.gather(a, a)


def drop_it(a):
    return ops.dropout(a, popxl.constant([1, 2], popxl.uint32), 2.0)


def index_it(a):
    return a[9]


def lower_it(a):
    return ops.call(popxl.gir().create_graph(reshape_it, a), a)


@pytest.mark.parametrize(
    ("build", "function", "line"),
    [
        (slice_it, slice_it, "ops.slice("),
        (reshape_it, reshape_it, "reshape("),
        (gather_it, gather_it, "gather("),
        (drop_it, drop_it, "dropout("),
        (index_it, index_it, "a[9]"),
        (lower_it, reshape_it, "reshape("),
    ],
)
def test_an_error_before_there_is_an_op_names_the_line_once(build, function, line):
    with pytest.raises((ValueError, IndexError)) as caught:
        popxl.Ir().create_graph(build, A)
    assert str(caught.value).count(_line_of(function, line)) == 1
    assert str(caught.value).count(__file__) == 1


def test_an_error_of_the_program_stays_as_it_is():
    def fails(a):
        raise ValueError("mine")

    with pytest.raises(ValueError, match=r"\Amine\Z"):
        popxl.Ir().create_graph(fails, A)


# ---- running it ---------------------------------------------------------------------------------
def load_past_the_end(buffer, at):
    return ops.remote_load(buffer, at)


def store_past_the_end(buffer, at):
    ops.remote_store(buffer, at, popxl.constant(np.ones(2, np.float32)))


@pytest.mark.parametrize("move", [load_past_the_end, store_past_the_end])
@pytest.mark.parametrize("memory", ["device", "pinned_host"])
def test_an_entry_that_is_not_there_names_the_line(move, memory, monkeypatch):
    monkeypatch.setattr(platforms.Cpu, "host_memory", memory)
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        buffer = popxl.remote_buffer((2,), popxl.float32, 3)
        at = ops.host_load(popxl.h2d_stream((), popxl.int32, "at"))
        move(buffer, at)
    with popxl.Session(ir) as session, pytest.raises(IndexError) as caught:
        session.run({session.expected_inputs()[0]: np.int32(7)})
    assert str(caught.value).endswith(f"({_line_of(move, 'ops.remote_')})")


def choose_by_replica(buffer, flag):
    graphs = [popxl.gir().create_graph(lambda b=b: ops.remote_load(b, 0)) for b in (buffer, buffer)]
    return ops.conditional(flag, *graphs)


def test_a_condition_that_differs_between_replicas_names_the_line():
    ir = popxl.Ir(replication=2)
    with ir.main_graph, popxl.in_sequence():
        buffer = popxl.remote_buffer((2,), popxl.float32, 3)
        flag = ops.host_load(popxl.h2d_stream((), popxl.bool, "flag"))
        choose_by_replica(buffer, flag)
    with popxl.Session(ir) as session, pytest.raises(popart_exception, match="differs") as caught:
        session.run({session.expected_inputs()[0]: np.array([True, False])})
    assert str(caught.value).endswith(f"({_line_of(choose_by_replica, 'ops.conditional')})")
    assert any("main" in note for note in caught.value.__notes__)


# ---- compiling it -------------------------------------------------------------------------------
def call_it(x, inner):
    return ops.call(inner, x)


def repeat_it(x, inner):
    return ops.repeat(inner, 3, x)


def choose_it(x, inner):
    return ops.conditional(popxl.constant(True), inner, inner, [x], [x])


def failing(x, error):
    return _fail(x, error)


@pytest.mark.parametrize("run", [call_it, repeat_it, choose_it])
def test_an_error_while_lowering_names_the_op_in_the_called_graph(run):
    ir = popxl.Ir()
    with ir.main_graph:
        x = popxl.variable(np.ones((2, 3), np.float32), name="x")
        inner = ir.create_graph(failing, x, "NotImplementedError")
        run(x, inner)
    with pytest.raises(popart_exception) as caught:
        popxl.Session(ir)
    message = str(caught.value)
    assert f"graph {inner.id!r}" in message
    assert "`%y: float32[2, 3] = failing_NotImplementedError(%x)`" in message
    assert _line_of(_fail, "emit(") in message
    assert message.endswith("NotImplementedError: no rule for this")
    assert isinstance(caught.value.__cause__, NotImplementedError)
    assert "cannot be lowered" not in str(caught.value.__cause__)


def test_any_error_is_told_with_its_type():
    ir = popxl.Ir()
    with ir.main_graph:
        _fail(popxl.variable(np.ones((2, 3), np.float32), name="x"), "KeyError")
    with pytest.raises(popart_exception, match=r"graph 'main'.*KeyError: 'missing'"):
        popxl.Session(ir)


def test_sentences_for_the_user_stay_as_they_are():
    ir = popxl.Ir()
    with ir.main_graph:
        _fail(popxl.variable(np.ones((2, 3), np.float32), name="x"), "popart_exception")
    with pytest.raises(popart_exception) as caught:
        popxl.Session(ir)
    assert str(caught.value) == "a sentence for the user"
