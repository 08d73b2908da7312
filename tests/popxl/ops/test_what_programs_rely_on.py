"""Details of ops that signatures do not show and programs written for PopXL count on."""

from __future__ import annotations

import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.errors import popart_exception


@pytest.fixture
def ir():
    ir = popxl.Ir()
    with ir.main_graph:
        yield ir


def ones(*shape: int, dtype: popxl.dtype = popxl.float32) -> popxl.Tensor:
    return popxl.constant(np.ones(shape), dtype)


@pytest.mark.parametrize("option", ["", "half", "HALF", "Float"])
def test_the_partials_of_products_may_be_a_session_option(ir, option):
    ir._pb_ir.getSessionOptions().partialsTypeMatMuls = option
    assert ops.matmul(ones(2, 3), ones(3, 2)).shape == (2, 2)


@pytest.mark.parametrize("option", ["single", "float32", None, 16])
def test_unknown_partials_are_refused_where_a_product_does_not_say_its_own(ir, option):
    ir._pb_ir.getSessionOptions().partialsTypeMatMuls = option
    with pytest.raises(ValueError, match="partialsTypeMatMuls"):
        ops.matmul(ones(2, 3), ones(3, 2))
    ops.matmul(ones(2, 3), ones(3, 2), partials_type=popxl.float32)


def test_parts_that_do_not_add_up_are_popart_s_error_and_a_number_that_does_not_divide_is_not(ir):
    with pytest.raises(popart_exception, match=r"split: parts \(2, 3\)"):
        ops.split(ones(2, 6), [2, 3], 1)
    with pytest.raises(ValueError, match="no 4 equal parts"):
        ops.split(ones(2, 6), 4, 1)


def test_a_slice_of_everything_is_the_tensor_itself(ir):
    t = ones(2, 6)
    before = len(ir.main_graph.ops)
    assert ops.slice(t) is ops.slice_(t) is ops.slice(t, axis=1) is t
    assert len(ir.main_graph.ops) == before
    assert ops.slice(t, 0) is not t


def test_prints_are_called_after_their_tensor(capfd):
    ir = popxl.Ir()
    with ir.main_graph:
        x = popxl.constant(np.float32(2), name="weights")
        fwd = ir.create_graph(lambda w: ops.print_tensor(w * w, print_gradient=True), x)
        (square,) = (t for t in fwd.tensors if t.name == "mul_out")
        info = popxl.transforms.autodiff(fwd)
        called = ops.call_with_info(fwd, x)
        ops.call(info.graph, popxl.constant(1.0), inputs_dict=info.inputs_dict(called))
        ops.print_tensor(x)
        ops.print_tensor(x, "own")
    with popxl.Session(ir) as session:
        session.run()
    lines = capfd.readouterr().err.splitlines()
    assert {f"print_{square.name}: 4.", f"print_{square.name}_gradient: 1."} <= set(lines)
    assert {"print_weights: 2.", "own: 2."} <= set(lines)


def test_products_in_float8_check_operands_then_the_scale_then_the_rest(ir):
    zero = popxl.constant(0, popxl.int32)
    x = ops.pow2scale_cast_to_fp8(ones(2, 2), zero, popxl.float8_143)
    two, wide = popxl.constant(np.zeros(2, np.float32)), popxl.constant(0.0)

    def product(lhs, rhs, scale):
        ops.matmul_pow2scaled(lhs, rhs, scale, available_memory_proportion="much")

    with pytest.raises(TypeError, match="operands must be float8"):
        product(x, ones(2, 2), two)
    with pytest.raises(ValueError, match="must be a scalar"):
        product(x, x, two)
    with pytest.raises(TypeError, match="must be an int32 tensor"):
        product(x, x, wide)
    with pytest.raises(ValueError, match="much"):
        product(x, x, zero)


def test_a_conditional_has_no_inputs_past_its_last(ir):
    x = ones(2)
    graph = ir.create_graph(lambda a, b: a + b, x, x)
    info = ops.conditional_with_info(popxl.constant(True), graph, graph, [x, x], [x, x])
    assert info.parent_to_graph_input_index(4) == info.parent_to_graph_input_index(2) == 1
    assert [info.is_parent_index_in_then_branch(i) for i in (1, 4)] == [True, False]
    for wrong in (5, 6, -1):
        for ask in (info.parent_to_graph_input_index, info.is_parent_index_in_then_branch):
            with pytest.raises(IndexError):
                ask(wrong)
    for ask in (
        info.graph_to_parent_input_index,
        info.graph_to_parent_output_index,
        info.parent_to_graph_output_index,
    ):
        for then in (True, False):
            with pytest.raises(IndexError):
                ask(2, then)
