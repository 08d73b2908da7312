"""Calls: values, references, call sites."""

from __future__ import annotations

import numpy as np
import pytest

import popxl
from popxl import ops
from popxl._analysis.alias_analysis import owners
from popxl.transforms import autodiff
from tests.popxl.programs import f32, graph_of, run, run_ir, store

pytestmark = pytest.mark.usefixtures("compiled_quickly")


# ---- what reaches the caller --------------------------------------------------------------------
def _changes(x):
    x += 1.0
    return x * 10.0


def _changes_reference(x: popxl.TensorByRef):
    x += 1.0
    return x * 10.0


X = f32(3)


@pytest.mark.parametrize(
    ("fn", "mark", "reaches"),
    [(_changes, False, False), (_changes, True, True), (_changes_reference, False, True)],
)
def test_changes_reach_the_caller_only_by_reference_or_when_marked(fn, mark, reaches):
    def build(x):
        x = ops.identity(x)
        info = ops.call_with_info(graph_of(fn, x), x)
        if mark:
            info.set_parent_input_modified(x)
        return info.outputs[0], x * 1.0

    y, x = run(build, X)
    np.testing.assert_allclose(y, (X + 1) * 10, rtol=1e-6)
    np.testing.assert_allclose(x, X + 1 if reaches else X, rtol=1e-6)


def test_references_pass_through_nested_calls():
    def outer(x: popxl.TensorByRef, y):
        (z,) = ops.call(graph_of(_changes_reference, x), x)
        return z + y

    def build(x):
        x = ops.identity(x)
        return *ops.call(graph_of(outer, x, x), x, x), x * 1.0

    z, x = run(build, X)
    np.testing.assert_allclose(z, (X + 1) * 10 + X, rtol=1e-6)
    np.testing.assert_allclose(x, X + 1, rtol=1e-6)


def test_a_value_in_between_stops_a_reference():
    def outer(x):
        return ops.call(graph_of(_changes_reference, x), x)[0]

    def build(x):
        x = ops.identity(x)
        return *ops.call(graph_of(outer, x), x), x * 1.0

    _, x = run(build, X)
    np.testing.assert_array_equal(x, X)


def test_marked_calls_inside_called_graphs_reach_a_reference_above():
    def outer(x: popxl.TensorByRef):
        ops.call_with_info(graph_of(_changes, x), x).set_parent_input_modified(x)

    def build(x):
        x = ops.identity(x)
        ops.call(graph_of(outer, x), x)
        return x * 1.0

    np.testing.assert_allclose(run(build, X)[0], X + 1, rtol=1e-6)


def test_a_called_graph_changes_a_variable_for_good():
    ir = popxl.Ir()
    with ir.main_graph:
        v = popxl.variable(X)
        graph = ir.create_graph(_changes_reference, v)
        for _ in range(2):
            ops.call(graph, v)
    with popxl.Session(ir) as session:
        session.run()
        session.run()
        np.testing.assert_allclose(session.get_tensor_data(v), X + 4, rtol=1e-6)


def test_one_graph_serves_several_tensors():
    def build(a, b):
        a, b = ops.identity(a), ops.identity(b)
        graph = graph_of(_changes_reference, a)
        ys = [ops.call(graph, t)[0] for t in (a, b, a)]
        return *ys, a * 1.0, b * 1.0

    a, b = f32(3), f32(3, seed=1)
    found = run(build, a, b)
    expected = [(a + 1) * 10, (b + 1) * 10, (a + 2) * 10, a + 2, b + 1]
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)


def test_an_input_can_be_an_output():
    def build(x):
        return ops.call(graph_of(lambda a, b: (b, a, b), x, x), x, x + 1)

    for found, expected in zip(run(build, X), (X + 1, X, X + 1), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6)


# ---- inputs -------------------------------------------------------------------------------------
def test_inputs_by_position_by_tensor_and_as_host_data():
    def build(x):
        graph = graph_of(lambda a, b, c, d: a + b * 10 + c * 100 + d * 1000, x, x, x, x)
        a, b, c, _ = graph.inputs
        first = ops.call(graph, x, 2.0 * X, [3.0, 3.0, 3.0], x)
        second = ops.call(graph, [x, x], inputs_dict={b: X * 2, c: X * 3})
        third = ops.call(graph, [x], [x], inputs_dict={a: X, b: X})
        return *first, *second, *third

    first, second, third = run(build, X)
    np.testing.assert_allclose(first, X + 20 * X + 300 + 1000 * X, rtol=1e-5)
    np.testing.assert_allclose(second, X * (1 + 20 + 300 + 1000), rtol=1e-5)
    np.testing.assert_allclose(third, X * 1111, rtol=1e-5)


def test_wrong_inputs_are_errors_that_name_what_is_wrong(ir):
    x = popxl.variable(X, name="x")
    graph = ir.create_graph(lambda a, b: a + b, x, x)
    with pytest.raises(ValueError, match=r"lacks values for its inputs \['b'\]"):
        ops.call(graph, x)
    with pytest.raises(ValueError, match="takes 2 positional inputs, but got 3"):
        ops.call(graph, x, x, x)
    with pytest.raises(ValueError, match="is no input of graph"):
        ops.call(graph, x, x, inputs_dict={x: x})
    with pytest.raises(ValueError, match=r"input 'b' of graph .* is float32\[3\], but 'wide'"):
        ops.call(graph, x, popxl.variable(np.ones(4, np.float32), name="wide"))
    with pytest.raises(ValueError, match=r"'half' is float16\[3\]"):
        ops.call(graph, x, popxl.variable(X.astype(np.float16), name="half"))
    inner = ir.create_graph(lambda y: y, x).inputs[0]
    with pytest.raises(ValueError, match="belongs to graph"):
        ops.call(graph, x, inner)


def test_a_graph_of_another_ir_cannot_be_called(ir):
    other = popxl.Ir()
    with pytest.raises(ValueError, match="belongs to another Ir"):
        ops.call(other.create_empty_graph("g"))


# ---- call sites ---------------------------------------------------------------------------------
def test_call_sites_translate_between_caller_and_graph(ir):
    a, b = popxl.variable(X), popxl.variable(X)
    graph = ir.create_graph(lambda p, q: (p + q, p * q), a, b)
    info = ops.call_with_info(graph, a, b)
    assert info.called_graph is graph
    assert info.inputs == (a, b)
    assert [info.graph_to_parent(t) for t in (*graph.inputs, *graph.outputs)] == [
        a, b, *info.outputs,
    ]  # fmt: skip
    assert [info.parent_to_graph(t) for t in (a, b, *info.outputs)] == [
        *graph.inputs, *graph.outputs,
    ]  # fmt: skip
    assert info.parent_input(1) is b
    assert info.parent_output(1) is info.outputs[1]
    for translate in (
        info.graph_to_parent_input_index, info.parent_to_graph_input_index,
        info.graph_to_parent_output_index, info.parent_to_graph_output_index,
    ):  # fmt: skip
        assert translate(1) == 1
        with pytest.raises(IndexError, match="index 2"):
            translate(2)
    with pytest.raises(ValueError, match="no input or output"):
        info.graph_to_parent(a)
    with pytest.raises(ValueError, match="no input or output"):
        info.parent_to_graph(graph.inputs[0])
    with pytest.raises(ValueError, match="no input of this call"):
        info.set_parent_input_modified(popxl.variable(1.0))


def test_a_call_site_gains_the_outputs_that_autodiff_adds(ir):
    x = popxl.variable(X)
    graph = ir.create_graph(lambda t: ops.sum(ops.exp(t * t)), x)
    info = ops.call_with_info(graph, x)
    before = info.outputs
    gradient = autodiff(graph)
    assert len(graph.outputs) > 1
    assert len(info.outputs) == len(graph.outputs)
    assert info.outputs[0] is before[0]
    (grad,) = ops.call(gradient.graph, 1.0, inputs_dict=gradient.inputs_dict(info))
    results = [store(info.outputs[0]), store(grad)]
    value, grad = run_ir(ir, results)
    np.testing.assert_allclose(value, np.exp(X * X).sum(), rtol=1e-5)
    np.testing.assert_allclose(grad, 2 * X * np.exp(X * X), rtol=1e-5)


def test_outputs_are_named_after_the_graph_s(ir):
    x = popxl.variable(X)
    graph = ir.create_graph(lambda t: ops.rename(t, "logits"), x)
    assert ops.call(graph, x)[0].name == "logits"


@pytest.mark.parametrize(
    "use",
    [
        lambda g: ops.call(g),
        lambda g: ops.repeat(g, 2),
        lambda g: ops.conditional(popxl.constant(True), g, g),
    ],
    ids=["call", "repeat", "conditional"],
)
def test_a_graph_cannot_be_used_inside_itself_or_another_ir(use):
    ir = popxl.Ir()
    graph, foreign = ir.create_empty_graph("g"), popxl.Ir().create_empty_graph("h")
    with graph:
        for mine in (graph, ir.main_graph):
            with pytest.raises(ValueError, match="cannot be used inside itself"):
                use(mine)
        with pytest.raises(ValueError, match="belongs to another Ir"):
            use(foreign)


def test_code_is_loaded_to_where_it_runs():
    with popxl.Ir().main_graph as main:
        graph = main.ir.create_empty_graph("g")
        ops.remote_code_load(graph, destination="executable")
        for place in ("compute_buffer", "io_buffer"):
            with pytest.raises(NotImplementedError):
                ops.remote_code_load(graph, destination=place)
            with pytest.raises(NotImplementedError):
                ops.code_copy(graph, place, "executable")
        with graph, pytest.raises(ValueError, match="cannot load its own code"):
            ops.remote_code_load(graph, "executable")
        with pytest.raises(ValueError, match="unknown code location 'moon'"):
            ops.remote_code_load(graph, "moon")


# ---- what is refused ----------------------------------------------------------------------------
def _all_ways(ir, graph, value):
    """Calls of `graph`, of one input, with `value`."""
    yes, branch = popxl.constant(True), ir.create_graph(lambda: popxl.constant(1.0) * 2.0)
    return [
        lambda: ops.call(graph, value),
        lambda: ops.call_with_info(graph, value),
        lambda: ops.call(graph, inputs_dict={graph.inputs[0]: value}),
        lambda: ops.repeat(graph, 2, value),
        lambda: ops.conditional(yes, graph, branch, [value], []),
        lambda: ops.conditional(yes, branch, graph, [], [value]),
    ]


@pytest.mark.parametrize("value", ["text", None, {"a": 1}])
def test_an_input_that_can_be_no_tensor_is_an_error(ir, value):
    graph = graph_of(lambda x: x * 2.0, popxl.variable(1.0))
    for use in _all_ways(ir, graph, value):
        with pytest.raises(TypeError, match="'x' must be a tensor or data of float32"):
            use()


def test_numbers_become_constants_of_the_input_s_dtype(ir):
    graph = graph_of(lambda x: x * 2.0, popxl.variable(np.float16(1.0)))
    assert ops.call(graph, 3)[0].dtype == popxl.float16


def test_missing_inputs_of_a_branch_are_an_error(ir):
    x = popxl.variable(1.0)
    graph, yes = graph_of(lambda t: t * 2.0, x), popxl.constant([True])
    for inputs in ({"then_inputs": [x]}, {"else_inputs": [x]}, {}):
        with pytest.raises(ValueError, match="lacks values for its inputs"):
            ops.conditional(yes, graph, graph, **inputs)


# ---- references to one tensor -------------------------------------------------------------------
def _adds_to_both(a: popxl.TensorByRef, b: popxl.TensorByRef):
    a += 1.0
    b += 1.0


def _adds_to_one(a: popxl.TensorByRef, b: popxl.TensorByRef):
    a += b


def _reads_both(a: popxl.TensorByRef, b: popxl.TensorByRef):
    return a * b


@pytest.mark.parametrize("fn", [_adds_to_both, _adds_to_one])
@pytest.mark.parametrize("how", ["tensor", "view", "in place"])
def test_two_references_to_what_is_changed_are_refused(ir, fn, how):
    x = popxl.variable(np.ones((2, 2), np.float32), name="x")
    graph = graph_of(fn, x, x)
    if how == "tensor":
        other = x
    elif how == "view":
        other = x.T_
    else:
        other = ops.add_(x, popxl.constant(1.0))
    for use in (
        lambda: ops.call(graph, x, other),
        lambda: ops.repeat(graph, 2, x, other),
        lambda: ops.conditional(popxl.constant(True), graph, graph, [x, other], [x, x]),
    ):
        with pytest.raises(ValueError, match="passes 'x' as two references"):
            use()
    before = len(ir.main_graph.ops)
    ops.call(graph_of(_reads_both, x, x), x, other)
    ops.call(graph, x, popxl.variable(np.ones((2, 2), np.float32)))
    assert len(ir.main_graph.ops) == before + 2


def test_a_change_that_comes_after_the_call_is_found_when_a_session_is_made(ir):
    x = popxl.variable(X, name="x")
    graph = graph_of(_reads_both, x, x)
    ops.call(graph, x, x)
    with graph:
        ops.add_(graph.inputs[0], graph.inputs[1])
    with pytest.raises(ValueError, match="passes 'x' as two references"):
        popxl.Session(ir)


def test_two_inputs_said_to_be_changed_must_not_be_one(ir):
    def both(a, b):
        a += 1.0
        b += 1.0

    x = popxl.variable(X, name="x")
    site = ops.call_with_info(graph_of(both, x, x), x, x)
    with pytest.raises(ValueError, match="passes 'x' as two references"):
        site.set_parent_input_modified(x)


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_only_what_the_graph_changes_reaches_a_tensor_passed_twice(ir, dtype):
    def first(a, b):
        a += b

    x = popxl.variable(np.ones(3, dtype))
    site = ops.call_with_info(graph_of(first, x, x), x, x)
    site.set_parent_input_modified(x)
    np.testing.assert_array_equal(run_ir(ir, [store(x)])[0], [2, 2, 2])


def test_a_thousand_updates_in_place(ir):
    x = popxl.variable(np.zeros(2, np.float32))
    t = x
    for _ in range(1200):
        t = ops.add_(t, t)
    ops.add_(t, popxl.constant(np.ones(2, np.float32)))
    assert owners(t) == [x]
    assert ir.main_graph.functional.changed == (0,)


def test_an_owner_of_several_parts_is_found_once(ir):
    x = popxl.variable(np.zeros(4, np.float32))
    joined = ops.concat_([ops.slice_(x, 2, 4), ops.slice_(x, 0, 2)])
    assert owners(joined) == [x]
