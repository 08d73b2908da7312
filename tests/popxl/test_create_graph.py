"""How a Python function and its arguments become a graph."""

from __future__ import annotations

import functools
import threading

import numpy as np
import pytest

import popxl
from popxl import ops


def _names(graph: popxl.Graph) -> list[str]:
    return [t.name for t in graph.inputs]


def _by_ref(graph: popxl.Graph) -> list[bool]:
    return [t._by_ref for t in graph.inputs]


def module_level(x):
    return x


# ---- names --------------------------------------------------------------------------------------
def test_graphs_are_numbered_by_the_function_they_come_from(ir):
    x = popxl.variable(1.0)
    assert [ir.create_graph(module_level, x).id for _ in range(2)] == [
        "module_level_subgraph(0)", "module_level_subgraph(1)",
    ]  # fmt: skip


def test_a_local_function_is_named_without_locals(ir):
    def inner(x):
        return x

    here = "test_a_local_function_is_named_without_locals"
    assert ir.create_graph(inner, popxl.variable(1.0)).name == f"{here}.inner_subgraph(0)"
    name = ir.create_graph(lambda x: x, popxl.variable(1.0)).name
    assert name == f"{here}.<lambda>_subgraph(0)"


class Scale(popxl.Module):
    def __init__(self, by: float) -> None:
        self.by = by

    def build(self, x: popxl.Tensor, *, shift: popxl.TensorByRef, twice: bool = False):
        return x * (self.by * (2 if twice else 1)) + shift


def test_a_module_gives_its_class_name_and_the_signature_of_build(ir):
    x, shift = popxl.variable(np.ones(2, np.float32)), popxl.variable(np.ones(2, np.float32))
    graph = ir.create_graph(Scale(3.0), x, shift=shift, twice=True)
    assert graph.name == "Scale_subgraph(0)"
    assert _names(graph) == ["x", "shift"]
    assert _by_ref(graph) == [False, True]


def test_a_partial_function_can_become_a_graph(ir):
    graph = ir.create_graph(functools.partial(lambda a, b: b, 3), popxl.variable(1.0))
    assert _names(graph) == ["b"]


def test_tensor_ids_start_with_the_graph(ir):
    graph = ir.create_graph(module_level, popxl.variable(1.0))
    assert graph.inputs[0].id == "module_level_subgraph(0)/x"
    assert graph.get_tensor("module_level_subgraph(0)/x") is graph.inputs[0]
    assert graph.get_tensor("x") is graph.inputs[0]
    with pytest.raises(ValueError, match="has no tensor 'missing'"):
        graph.get_tensor("missing")


def test_an_empty_graph_is_filled_by_hand(ir):
    graph = ir.create_empty_graph("filled")
    with graph:
        x = popxl.graph_input((2,), popxl.float32, "x", by_ref=True)
        popxl.graph_output(x + 1)
    assert graph.name == "filled_subgraph(0)"
    assert ir.create_empty_graph().name == "graph_subgraph(0)"
    assert _by_ref(graph) == [True]
    assert graph.inputs_by_name == {"x": x}
    assert graph.outputs[0] in graph


# ---- inputs -------------------------------------------------------------------------------------
def test_tensors_and_specs_become_inputs_and_other_arguments_are_passed_on(ir):
    seen = []

    def fn(x, n, spec, text="a", flag=None):
        seen.append((n, text, flag))
        return x

    x = popxl.variable(np.ones((2, 3), np.float32))
    graph = ir.create_graph(fn, x, 4, popxl.TensorSpec((5,), popxl.int32), flag=[1, 2])
    assert seen == [(4, "a", [1, 2])]
    assert [(t.name, t.shape, t.dtype) for t in graph.inputs] == [
        ("x", (2, 3), popxl.float32), ("spec", (5,), popxl.int32),
    ]  # fmt: skip


def test_inputs_follow_the_signature_not_the_call(ir):
    def fn(a, b, c):
        return a

    a, b, c = (popxl.variable(float(i), name=n) for i, n in enumerate("abc"))
    assert _names(ir.create_graph(fn, c=c, a=a, b=b)) == ["a", "b", "c"]


def test_the_function_gets_inputs_of_the_new_graph(ir):
    def fn(x, many):
        assert x.name == "x"
        assert all(t in popxl.gcg() for t in (x, *many))
        assert isinstance(many, list)

    graph = ir.create_graph(fn, popxl.variable(1.0), [popxl.variable(2.0), popxl.variable(3.0)])
    assert _names(graph) == ["x", "many_0", "many_1"]


def test_tensors_in_tuples_varargs_and_keywords(ir):
    def fn(pair, *rest, **named):
        assert isinstance(pair, tuple)
        assert set(named) == {"p", "q"}

    a = popxl.variable(1.0)
    graph = ir.create_graph(fn, (a, a), a, a, p=a, q=3)
    assert _names(graph) == ["pair_0", "pair_1", "rest_0", "rest_1", "p"]


def test_annotations_as_text_mark_references(ir):
    # This file postpones the evaluation of annotations: they are strings here.
    def fn(a: popxl.TensorByRef, b: popxl.Tensor, many: list[popxl.TensorByRef]):
        return None

    assert isinstance(fn.__annotations__["a"], str)
    a = popxl.variable(1.0)
    assert _by_ref(ir.create_graph(fn, a, a, [a, a])) == [True, False, True, True]


def test_annotations_as_objects_mark_references(ir):
    def fn(a, b, many, maybe):
        return None

    fn.__annotations__ = {
        "a": popxl.TensorByRef, "b": popxl.Tensor, "many": list[popxl.TensorByRef],
        "maybe": popxl.TensorByRef | None,
    }  # fmt: skip
    a = popxl.variable(1.0)
    assert _by_ref(ir.create_graph(fn, a, a, [a], a)) == [True, False, True, True]


def test_a_shard_keeps_its_whole_shape(ir):
    _, shard = popxl.replica_sharded_variable(np.ones((2, 3), np.float32))
    graph = ir.create_graph(module_level, shard)
    assert graph.inputs[0].meta_shape == (2, 3)


# ---- outputs ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("returned", "count"),
    [(lambda x: None, 0), (lambda x: x, 1), (lambda x: (x, x + 1), 2), (lambda x: [x], 1),
     (lambda x: (t for t in (x, x)), 2), (lambda x: {"k": x}.values(), 1)],
)  # fmt: skip
def test_what_a_function_returns_are_the_outputs(ir, returned, count):
    assert len(ir.create_graph(returned, popxl.variable(1.0)).outputs) == count


@pytest.mark.parametrize("wrong", [3, "text", [1.0], object()])
def test_returning_something_else_is_an_error(ir, wrong):
    with pytest.raises(ValueError, match="must return tensors"):
        ir.create_graph(lambda x: wrong, popxl.variable(1.0))


@pytest.mark.parametrize("other", [3, "text", None, [4]])
def test_a_list_of_tensors_and_other_things_is_an_error(ir, other):
    x, spec = popxl.variable(1.0), popxl.TensorSpec((), popxl.float32)
    for mixed in ([x, other], (other, spec), [[x, other]]):
        with pytest.raises(TypeError, match="pass them as arguments of their own"):
            ir.create_graph(lambda ts: x, mixed)
    with pytest.raises(TypeError, match="'xs' holds tensors"):
        ir.create_graph(lambda *xs: xs[0], x, other)
    nested = ir.create_graph(lambda ts: ts[1][0] * 1.0, [x, [spec, x]])
    assert len(nested.inputs) == 3


def test_returning_a_tensor_of_another_graph_is_an_error(ir):
    x = popxl.variable(1.0, name="outside")
    with pytest.raises(ValueError, match=r"outside.* belongs to graph 'main'"):
        ir.create_graph(lambda y: x, x)


def test_a_tensor_of_another_ir_is_an_error(ir):
    other, found = popxl.Ir(), []

    def make():
        with other.main_graph:
            found.append(popxl.variable(1.0, name="foreign"))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    with pytest.raises(ValueError, match="foreign.* belongs to another Ir"):
        ir.create_graph(module_level, *found)


def test_using_a_tensor_of_the_caller_inside_is_an_error_that_says_what_to_do(ir):
    x = popxl.variable(1.0, name="outside")
    with pytest.raises(ValueError, match=r"pass it as an input of that graph"):
        ir.create_graph(lambda y: y + x, x)


def test_a_failing_function_leaves_the_main_graph_current(ir):
    def fails(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        ir.create_graph(fails, popxl.variable(1.0))
    assert popxl.gcg() is ir.main_graph


def test_arguments_must_fit_the_function(ir):
    x = popxl.variable(1.0)
    for args, kwargs in (((x,), {}), ((x, x, x), {}), ((x, x), {"z": 1})):
        with pytest.raises(ValueError, match="arguments do not fit"):
            ir.create_graph(lambda x, y: x, *args, **kwargs)


# ---- the main graph -----------------------------------------------------------------------------
def test_the_main_graph_may_have_inputs_but_no_outputs(ir):
    t = popxl.graph_input((1,), popxl.float32, "x")
    assert ir.main_graph.inputs == (t,)
    with pytest.raises(ValueError, match="main graph has no outputs"):
        popxl.graph_output(popxl.variable(1.0))
    popxl.Session(ir)  # nothing reads it
    t + 1
    with pytest.raises(ValueError, match="'x', an input of the main graph, which nothing calls"):
        popxl.Session(ir)


def test_graphs_are_found_by_their_calls(ir):
    x = popxl.variable(1.0)
    inner = ir.create_graph(module_level, x)
    outer = ir.create_graph(lambda y: ops.call(inner, *ops.call(inner, y)), x)
    assert outer.called_graphs == (inner,)
    assert inner.called_graphs == ()


def test_hooks_see_the_ops_created_until_they_are_removed(ir):
    seen = []
    handle = ir.main_graph.register_op_created_hook(lambda op: seen.append(op.name))
    x = popxl.variable(1.0)
    x + x
    ir.main_graph.remove_op_created_hook(handle)
    x * x
    assert seen == ["add"]


def test_graphs_cannot_be_made_directly():
    with pytest.raises(TypeError, match="use ir.create_graph"):
        popxl.Graph()
