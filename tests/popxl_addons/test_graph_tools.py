"""Routing tensors into graphs, counting operations, pipelines, strided collectives."""

import re

import numpy as np
import pytest

import popxl
from popxl import ops
from popxl._core.verify import verify_ir
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


# ---- counting -----------------------------------------------------------------------------------
def test_products_and_loops_are_counted(capsys):
    ir = popxl.Ir()
    with ir.main_graph:
        x = popxl.constant(np.ones((2, 3), np.float32))
        w = popxl.constant(np.ones((3, 3), np.float32))
        step = ir.create_graph(lambda x, w: x @ w + 1.0, x, w)
        ops.repeat(step, 5, x, w)
        flops = evaluate_FLOPs(ir.main_graph)
    product, addition = 2 * 2 * 3 * 3, 2 * 3
    assert total_FLOPs(ir) == sum(flops.values()) == 5 * (product + addition)
    assert any(key.endswith(".matmul") for key in flops)
    print_FLOPs(flops)
    printed = capsys.readouterr().out
    assert printed.splitlines()[0] == "matmul: 180.000 FLOPs"
    assert printed.splitlines()[-1] == "total: 210.000 FLOPs"
    print_FLOPs(flops, mode="flat", numerical_format="K")
    assert "0.180 KFLOPs" in capsys.readouterr().out


def test_flops_are_written_in_the_unit_they_reach():
    assert format_flops_scientific(2.5e9) == "2.500 GFLOPs"
    assert format_flops_scientific(2.5e9, "T") == "0.003 TFLOPs"
    with pytest.raises(ValueError, match="unknown format"):
        format_flops_scientific(1, "P")


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


def test_stages_do_not_nest():
    ir = popxl.Ir()
    with ir.main_graph, pipelined_execution(2) as pipeline, pipeline.stage(0):
        inner = pipeline.stage(1)
        with pytest.raises(ValueError, match="inside stage 0"):
            inner.__enter__()
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
