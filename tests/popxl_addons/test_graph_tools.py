"""Routing tensors into graphs, counting operations, pipelines, strided collectives."""

import re

import numpy as np
import pytest

import popxl
from popxl import ops
from popxl._analysis.verify import verify_ir
from popxl_addons import NamedTensors, autodiff, pipelined_execution
from popxl_addons.ops.replicated_strided_collectives import (
    replicated_all_gather_strided,
    replicated_all_reduce_strided,
    replicated_all_reduce_strided_graph,
    replicated_all_reduce_strided_identical_grad_inputs,
    replicated_all_reduce_strided_identical_inputs,
    replicated_reduce_scatter_strided,
)
from popxl_addons.performance_utils import (
    evaluate_FLOPs,
    evaluate_ir_FLOPs,
    format_flops_scientific,
    print_FLOPs,
    total_FLOPs,
)
from popxl_addons.route_tensor import is_subgraph, route_tensor_into_graph
from tests.popxl_addons.helpers import replicas_run

SCALAR = popxl.TensorSpec((), popxl.float32)


# ---- routing ------------------------------------------------------------------------------------
def nested(ir):
    """main calls middle, middle repeats inner twice; returns the graphs."""
    inner = ir.create_graph(lambda x: x + 1.0, SCALAR)
    middle = ir.create_graph(lambda x: ops.repeat(inner, 2, x), SCALAR)
    return middle, inner


def test_a_tensor_reaches_a_graph_through_calls_and_loops():
    ir = popxl.Ir()
    with ir.main_graph:
        middle, inner = nested(ir)
        seven = ops.identity(popxl.constant(7.0))
        (y,) = ops.call(middle, popxl.constant(0.0))
        stream = popxl.d2h_stream((), popxl.float32)
        ops.host_store(stream, y)
        assert is_subgraph(ir.main_graph, inner)
        assert not is_subgraph(inner, middle)
        extra = route_tensor_into_graph(seven, inner)
        assert extra in inner
        out = popxl.d2h_stream((), popxl.float32)
        with inner:
            ops.host_store(out, extra * 2.0)
            assert route_tensor_into_graph(extra) is extra
    verify_ir(ir)
    ir.num_host_transfers = 2
    with popxl.Session(ir) as session:
        assert session.run()[out].tolist() == [14, 14]


def test_changes_may_come_back():
    ir = popxl.Ir()
    with ir.main_graph:
        middle, inner = nested(ir)
        counter = popxl.variable(0.0)
        ops.call(middle, popxl.constant(0.0))
        with inner:
            t = route_tensor_into_graph(counter, modified=True)
            ops.var_updates.accumulate_(t, popxl.constant(1.0))
    with popxl.Session(ir) as session:
        session.run()
    assert session.get_tensor_data(counter) == 2


def test_the_tensor_must_be_on_the_way():
    ir = popxl.Ir()
    with ir.main_graph:
        middle, inner = nested(ir)
        lonely = ir.create_graph(lambda x: ops.call(inner, x), SCALAR)
        t = popxl.constant(1.0)
        with pytest.raises(ValueError, match="does not call"):
            route_tensor_into_graph(t, inner)
        ops.call(middle, t)
        with pytest.raises(
            ValueError,
            match=re.escape(f"also called by '{lonely.id}'"),
        ):
            route_tensor_into_graph(t, inner)


def test_a_tensor_comes_by_one_input_however_often_it_is_routed():
    ir = popxl.Ir()
    with ir.main_graph:
        middle, inner = nested(ir)
        ops.call(middle, popxl.constant(0.0))
        t, other = popxl.variable(1.0), popxl.variable(2.0)
        found = [route_tensor_into_graph(t, inner) for _ in range(3)]
        assert found == [found[0]] * 3
        assert route_tensor_into_graph(other, inner) is not found[0]
        assert len(inner.inputs) == len(middle.inputs) == 3
        changed = route_tensor_into_graph(other, inner, modified=True)
        assert route_tensor_into_graph(other, inner) is changed
    verify_ir(ir)


# ---- counting -----------------------------------------------------------------------------------
def test_products_and_loops_are_counted_by_kind(capsys):
    ir = popxl.Ir(replication=2)
    with ir.main_graph:
        x = popxl.constant(np.ones((2, 3), np.float32))
        w = popxl.constant(np.ones((3, 3), np.float32))
        step = ir.create_graph(lambda x, w: x @ w + 1.0, x, w)
        ops.exp(x)  # counts nothing
        ops.repeat(step, 5, x, w)
        _ = x @ popxl.constant(np.ones(3, np.float32))
        flops = evaluate_FLOPs(ir.main_graph)
    product, addition, vector = 2 * 2 * 3 * 3, 2 * 3, 2 * 3 * 2
    assert flops.keys() == {"MatMul", "Add", "TOT"}
    assert flops["TOT"] == 5 * (product + addition) + vector
    nested, plain = flops["MatMul"].values()
    assert list(nested.values()) == [5 * product]
    assert plain == vector
    assert [list(v.values()) for v in flops["Add"].values()] == [[5 * addition]]
    assert all(isinstance(k, int) for k in evaluate_FLOPs(step)["MatMul"])
    assert total_FLOPs(ir) == evaluate_ir_FLOPs(ir)["TOT"] == 2 * flops["TOT"]
    print_FLOPs(flops)
    printed = capsys.readouterr().out.splitlines()
    assert printed == ["MatMul: 0.192E+03", "Add: 30.000E+00", "TOT: 0.222E+03"]
    print_FLOPs(flops, mode="flat", numerical_format="K")
    assert "0.180E+03" in capsys.readouterr().out


def test_the_dearer_branch_and_norms_count():
    ir = popxl.Ir()
    spec = popxl.TensorSpec((2, 4), popxl.float32)
    with ir.main_graph:
        weight = popxl.constant(np.ones(4, np.float32))
        cheap = ir.create_graph(lambda x: x - x, spec)
        dear = ir.create_graph(lambda x: x * x / x, spec)
        x = popxl.constant(np.ones((2, 4), np.float32))
        branch = popxl.constant(True, popxl.bool)
        ops.conditional(branch, cheap, dear, then_inputs=[x], else_inputs=[x])
        ops.group_norm(x, weight, weight, 2)
    flops = evaluate_FLOPs(ir.main_graph)
    assert flops.keys() == {"Mul", "Div", "GroupNormalization", "TOT"}
    assert flops["TOT"] == 2 * 8 + 8 * 8


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (9072, "K", "9.072E+03"),
        (2.5e9, "T", "0.003E+12"),
        (2.5e9, "nearest3", "2.500E+09"),
        (500000, "nearest3", "0.500E+06"),
        (50000, "nearest3", "50.000E+03"),
        (0, "nearest3", "0.000E+00"),
        (7e6, "M", "7.000E+06"),
        (7e6, "G", "0.007E+09"),
    ],
)
def test_flops_are_written_with_an_exponent_of_three(value, unit, text):
    assert format_flops_scientific(value, unit) == text
    with pytest.raises(ValueError, match="unknown format"):
        format_flops_scientific(value, "P")


# ---- pipelines ----------------------------------------------------------------------------------
def test_a_pipeline_takes_each_micro_batch_through_all_stages():
    steps = 3
    ir = popxl.Ir()
    ir.num_host_transfers = steps
    with ir.main_graph:
        data = popxl.h2d_stream((), popxl.float32)
        out = popxl.d2h_stream((), popxl.float32)
        w = popxl.variable(2.0, name="w")
        accumulator = popxl.variable(0.0, name="accumulator")
        square = ir.create_graph(lambda x, w: x * w * x, SCALAR, SCALAR)
        grad = autodiff(square, grads_required=[square.inputs[1]])
        with pipelined_execution(steps) as pipeline:
            with pipeline.stage(0), popxl.ipu(0):
                x = ops.host_load(data)
                info = ops.call_with_info(square, x, w)
            with pipeline.stage(1):
                y = pipeline.stash_and_restore_tensor(info.parent_output(0))
                args = pipeline.stash_and_restore_activations(info, grad.grad_graph_info)
                ops.host_store(out, y)
                (dw,) = grad.call(1.0, args=args)
                ops.var_updates.accumulate_(accumulator, dw)
            assert set(pipeline.ops) == {0, 1}
    verify_ir(ir)
    x = np.array([1, 2, 3], np.float32)
    with popxl.Session(ir) as session:
        result = session.run({data: x})[out]
    np.testing.assert_array_equal(result, 2 * x**2)
    assert session.get_tensor_data(accumulator) == (x**2).sum()


def test_of_nested_stages_the_inner_counts():
    ir = popxl.Ir()
    with ir.main_graph, pipelined_execution(2) as pipeline, pipeline.stage(0):
        with pipeline.stage(3):
            ops.init((), popxl.float32)
        ops.init((), popxl.float32)
        assert {i: len(made) for i, made in pipeline.ops.items()} == {3: 1, 0: 1}


def test_ops_and_stashes_outside_stages_are_refused():
    ir = popxl.Ir()
    one = popxl.TensorSpec((), popxl.float32)
    with ir.main_graph:
        w = popxl.variable(1.0)
        with pytest.raises(RuntimeError, match="in none of its stages"), pipelined_execution(2):
            ops.exp(w)
        with pipelined_execution(2) as pipeline:
            ir.create_graph(lambda t: t + 1.0, one)  # ops of another graph belong to no stage
            with pipeline.stage(0):
                x = ops.exp(w)
                with pytest.raises(TypeError, match="comes from stage 0 itself"):
                    pipeline.stash_and_restore_tensor(x)
                with pytest.raises(RuntimeError, match="from_stage"):
                    pipeline.stash_and_restore_tensor(w)
            with pipeline.stage(1):
                assert pipeline.stash_and_restore_tensor(x) is x
                assert pipeline.stash_and_restore_tensor(w, from_stage=0) is w
                with pytest.raises(TypeError, match="comes from stage 1"):
                    pipeline.stash_and_restore_tensor(w, from_stage=1)
            with pytest.raises(RuntimeError, match="outside a stage"):
                pipeline.stash_and_restore_tensor(x)
        ops.exp(w)  # behind the pipeline there are no stages


def test_a_pipeline_has_a_step():
    ir = popxl.Ir()
    none = pipelined_execution(0)
    with ir.main_graph, pytest.raises(ValueError, match="at least 1 step"):
        none.__enter__()


# ---- strided collectives ------------------------------------------------------------------------
def test_strided_collectives_reach_every_second_replica():
    x = np.arange(8, dtype=np.float32).reshape(4, 2)

    def build(x):
        group = popxl.gir().replica_grouping(stride=2)  # {0, 2}, {1, 3}
        part = replicated_reduce_scatter_strided(
            x, group=group, configure_output_for_replicated_tensor_sharding=True
        )
        graph, names = replicated_all_reduce_strided_graph(NamedTensors(t=x), "mean", group)
        assert names == ["t"]
        return [
            replicated_all_reduce_strided(x, group=group),
            replicated_all_reduce_strided_identical_inputs(x, group=group),
            replicated_all_reduce_strided_identical_grad_inputs(x, group=group),
            replicated_all_gather_strided(part, group),
            graph.bind(NamedTensors(t=x)).call()[0],
        ]

    total = x + x[[2, 3, 0, 1]]
    reduced, same, closed, gathered, mean = replicas_run(4, build, {"x": x})
    np.testing.assert_array_equal(same, x)
    np.testing.assert_array_equal(mean, total / 2)
    for result in (reduced, closed, gathered):
        np.testing.assert_array_equal(result, total)
