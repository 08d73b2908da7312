"""Plans of small programs whose numbers can be counted by hand."""

from __future__ import annotations

import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.plan import Collective, Plan, RegionCost, plan_of
from popxl.plan.cost_walk import CostWalk


def parts(plan: Plan) -> dict[str, RegionCost]:
    return {part.name: part for part in plan.parts}


def looped(steps: int = 5) -> popxl.Ir:
    """Each step loads a row of 4 × 8 numbers, multiplies it by a variable and stores it."""
    ir = popxl.Ir()
    with ir.main_graph:
        buffer = popxl.remote_buffer((4, 8), popxl.float32, steps)
        w = popxl.variable(np.zeros((8, 8), np.float32))

        def step(row: popxl.Tensor, w: popxl.Tensor) -> popxl.Tensor:
            with popxl.plan.part("product"):
                y = ops.gelu(ops.remote_load(buffer, row) @ w)
            ops.remote_store(buffer, row, y)
            return row + 1

        start = popxl.constant(0, popxl.int32)
        ops.repeat(ir.create_graph(step, start, w), steps, start, w)
    return ir


def test_loops_count_as_often_as_they_run():
    plan = plan_of(looped())
    product, rest = parts(plan)["product"], parts(plan)[""]
    assert product.flops == plan.flops == 5 * 2 * 4 * 8 * 8
    assert (product.host_to_device, rest.device_to_host) == (5 * 4 * 8 * 4, 5 * 4 * 8 * 4)
    assert (product.ops["matmul"], rest.ops["remote_store"]) == (5, 5)
    assert plan.remote == plan.host_bytes == 5 * 4 * 8 * 4
    assert plan.variables == 8 * 8 * 4


def fanned_out(depth: int) -> popxl.Ir:
    """Each level calls the one below it twice; the last multiplies an entry by itself."""
    ir = popxl.Ir()
    with ir.main_graph:
        buffer = popxl.remote_buffer((2, 2), popxl.float32, 1)

        def last(x: popxl.Tensor) -> popxl.Tensor:
            y = ops.remote_load(buffer, 0)
            return ops.tanh(x + y @ y)

        x = popxl.variable(np.zeros((2, 2), np.float32))
        graph = ir.create_graph(last, x)
        for _ in range(depth):

            def level(x: popxl.Tensor, below: popxl.Graph = graph) -> popxl.Tensor:
                for _ in range(2):
                    (x,) = ops.call(below, x)
                return x * 0.5

            graph = ir.create_graph(level, x)
        ops.call(graph, x)
    return ir


def test_a_routine_is_walked_once_however_often_it_is_called(monkeypatch):
    walked = []
    walk = CostWalk._walk_routine
    monkeypatch.setattr(
        CostWalk, "_walk_routine", lambda *args: (walked.append(args[1].title), walk(*args))[1]
    )
    plan = plan_of(fanned_out(12))
    assert plan.flops == 2**12 * 2 * 2**3
    assert sum(part.host_to_device for part in plan.parts) == 2**12 * 2 * 2 * 4
    assert len(walked) == len(set(walked)) == 14


def test_a_session_plans_its_program():
    ir = looped()
    session = popxl.Session(ir)
    assert session.plan().flops == plan_of(ir).flops
    assert session.plan().temporaries == session.memory_use().temporaries


def test_parts_are_those_where_ops_are_written_else_where_graphs_are_called():
    ir = popxl.Ir()
    with ir.main_graph:
        x = popxl.variable(np.zeros((2, 2), np.float32))

        def inner(x: popxl.Tensor) -> popxl.Tensor:
            y = x @ x
            with popxl.plan.part("own"):
                return y @ y

        graph = ir.create_graph(inner, x)
        out = popxl.d2h_stream((2, 2), popxl.float32)
        with popxl.plan.part("caller"):
            (y,) = ops.call(graph, x)
        ops.host_store(out, y)
    found = parts(plan_of(ir))
    assert {name: part.ops.get("matmul", 0) for name, part in found.items()} == {
        "caller": 1, "own": 1, "": 0,
    }  # fmt: skip


def test_what_nobody_uses_is_not_counted():
    """Dead code is not counted, since XLA removes it; nor are unused loop carries."""
    ir = popxl.Ir()
    with ir.main_graph:
        x = popxl.variable(np.zeros((4, 4), np.float32))
        out = popxl.d2h_stream((4, 4), popxl.float32)
        _ = x @ x

        def step(a: popxl.Tensor, b: popxl.Tensor) -> tuple[popxl.Tensor, popxl.Tensor]:
            return a + a, b @ b

        a, _ = ops.repeat(ir.create_graph(step, x, x), 3, x, x)
        ops.host_store(out, a)
    plan = plan_of(ir)
    assert plan.flops == 0
    assert plan.arithmetic == 3 * 16


def test_of_branches_the_dearer_counts():
    ir = popxl.Ir()
    with ir.main_graph:
        x = popxl.variable(np.zeros((4, 4), np.float32))
        cond = popxl.variable(np.array(True), popxl.bool)
        out = popxl.d2h_stream((4, 4), popxl.float32)
        once = ir.create_graph(lambda x: x @ x, x)
        twice = ir.create_graph(lambda x: x @ x @ x, x)
        (y,) = ops.conditional(cond, once, twice, [x], [x])
        ops.host_store(out, y)
    assert plan_of(ir).flops == 2 * (2 * 4**3)


def test_gradients_of_loops_and_branches_count():
    """The loop again, and two products for each one; of those for inputs, as many as are asked."""
    ir = popxl.Ir()
    with ir.main_graph:
        x = popxl.variable(np.zeros((4, 4), np.float32))
        body = ir.create_graph(lambda a, w: a @ w, x, x)
        loop = ir.create_graph(lambda a, w: ops.sum(ops.repeat(body, 3, a, w)[0]), x, x)
        grads = popxl.transforms.autodiff(loop)
        info = ops.call_with_info(loop, x, x)
        one = popxl.constant(1.0, popxl.float32)
        dx, dw = ops.call(grads.graph, one, inputs_dict=grads.inputs_dict(info))
        out = popxl.d2h_stream((4, 4), popxl.float32)
        ops.host_store(out, dx + dw)
    product = 2 * 4**3
    # Forwards for the loss: nobody uses it. Forwards again in the gradient: 3; backwards: 2 × 3.
    assert plan_of(ir).flops == 9 * product


def test_convolutions_count_a_multiply_add_for_each_weight_of_each_pixel():
    ir = popxl.Ir()
    with ir.main_graph:
        x = popxl.variable(np.zeros((2, 3, 8, 8), np.float32))
        w = popxl.variable(np.zeros((5, 3, 3, 3), np.float32))
        out = popxl.d2h_stream((2, 5, 6, 6), popxl.float32)
        ops.host_store(out, ops.conv(x, w))
    assert plan_of(ir).flops == 2 * (2 * 5 * 6 * 6) * (3 * 3 * 3)


@pytest.mark.parametrize("fused", [False, True])
def test_attention_counts_its_products(fused):
    """Forwards scores and output; backwards two for each, and the scores again if not kept."""
    queries, keys, features, of_v = 128, 5, 7, 11
    ir = popxl.Ir()
    with ir.main_graph:
        shapes = ((1, 2, queries, features), (1, 2, keys, features), (1, 2, keys, of_v))
        q, k, v = (popxl.variable(np.zeros(shape, np.float32)) for shape in shapes)
        graph = ir.create_graph(lambda *x: ops.attention(*x, scale=1.0, fused=fused), q, k, v)
        grads = popxl.transforms.autodiff(graph)
        info = ops.call_with_info(graph, q, k, v)
        dy = popxl.constant(np.zeros((1, 2, queries, of_v), np.float32))
        made = ops.call(grads.graph, dy, inputs_dict=grads.inputs_dict(info))
        for t in (*info.outputs, *made):
            ops.host_store(popxl.d2h_stream(t.shape, t.dtype), t)
    by_pair = (4 if fused else 3) * features + 3 * of_v
    assert plan_of(ir).flops == 2 * 2 * queries * keys * by_pair


def test_collectives_by_kind_and_group():
    ir = popxl.Ir(replication=8)
    with ir.main_graph:
        x = popxl.variable(np.zeros(64, np.float32))
        tp, dp = ir.replica_grouping(group_size=4), ir.replica_grouping(stride=4, group_size=2)
        shard = ops.collectives.replicated_reduce_scatter(x, "add", tp)
        whole = ops.collectives.replicated_all_gather(shard, group=tp)
        total = ops.collectives.replicated_all_reduce(whole, "add", dp)
        alone = ops.collectives.replicated_all_reduce(
            total, "add", ir.replica_grouping(group_size=1)
        )
        ops.host_store(popxl.d2h_stream((64,), popxl.float32), alone)
    plan = plan_of(ir)
    found = parts(plan)[""].collectives
    assert found == (
        Collective("all_gather", 4, True, 1, 256),
        Collective("all_reduce", 2, False, 1, 256),
        Collective("reduce_scatter", 4, True, 1, 256),
    )
    assert [c.sent for c in found] == [192, 256, 192]
    assert plan.replicas == 8


def test_code_loads_are_shown():
    ir = popxl.Ir()
    with ir.main_graph:
        x = popxl.variable(np.zeros(2, np.float32))
        graph = ir.create_graph(lambda x: x + x, x)
        with popxl.plan.part("layer"):
            ops.remote_code_load(graph, "executable")
    assert parts(plan_of(ir))["layer"].code_loads == 1


# ---- time ----------------------------------------------------------------------------------------
RATES = popxl.plan.Rates(
    flops=1e6, float8_flops=2e6, bandwidth=1e6, host_link=1e9, link=1e9, network=1e9,
    kernel_gap_s=1.0, dispatch_s=0.0, transfer_dispatch_s=0.0, per_array_s=0.0,
)  # fmt: skip


def seconds(build) -> float:
    """Estimated seconds of a function of a square matrix of 100 x 100 numbers."""
    ir = popxl.Ir()
    with ir.main_graph:
        y = build(popxl.variable(np.ones((100, 100), np.float32)))
        ops.host_store(popxl.d2h_stream(y.shape, y.dtype), y)
    return popxl.plan.trace_program(ir, "gpu").timeline(RATES).compute_seconds


def test_a_gpu_multiplies_transposed_matrices_without_a_kernel_that_transposes():
    plain = seconds(lambda x: ops.tanh(x) @ x)
    assert seconds(lambda x: ops.tanh(x) @ ops.transpose(x)) == plain
    assert seconds(lambda x: ops.transpose(ops.tanh(x)) @ x) == plain
    assert seconds(lambda x: ops.tanh(x) @ (ops.transpose(x) + 1.0)) > plain + 1.0


def test_a_gpu_adds_a_product_to_an_accumulator_as_it_writes_it():
    def added(y: popxl.Tensor) -> popxl.Tensor:
        total = popxl.variable(np.ones((100, 100), np.float32))
        return ops.var_updates.accumulate_(total, y)

    product = seconds(lambda x: x @ x)
    taken = product + RATES.accumulate_exposed * 0.08
    assert seconds(lambda x: added(x @ x)) == pytest.approx(taken)
    assert seconds(lambda x: added(ops.tanh(x @ x))) > product + 1.0


def test_kernels_run_one_after_the_other():
    """A product takes 2 s and moves 0.12 MB; what follows it moves 0.08 MB, and cannot hide."""
    once = seconds(lambda x: ops.tanh(x @ x))
    twice = seconds(lambda x: ops.tanh(ops.tanh(x @ x) @ x))
    assert twice - once == pytest.approx(2 + 0.08 + 2 * 1.0)


def test_what_takes_a_slice_reads_no_more():
    """A slice reads its elements only, also when it is computed where it is used."""
    whole, part = (seconds(lambda x, n=n: ops.tanh(x[:n] * 2)) for n in (100, 25))
    # A stream that is as long is read and written.
    assert whole - part == pytest.approx(0.75 * 3 * 0.04)


# ---- memory -------------------------------------------------------------------------------------
def perceptron(width: int = 256, batch: int = 64, layers: int = 4) -> popxl.Ir:
    """A loop over layers of a two-layer perceptron with a gelu, weights in remote buffers."""
    ir = popxl.Ir()
    with ir.main_graph:
        first = popxl.remote_buffer((width, 4 * width), popxl.float32, layers)
        second = popxl.remote_buffer((4 * width, width), popxl.float32, layers)
        x = popxl.variable(np.zeros((batch, width), np.float32))

        def layer(row: popxl.Tensor, x: popxl.Tensor) -> list[popxl.Tensor]:
            hidden = ops.gelu(x @ ops.remote_load(first, row))
            return [row + 1, x + hidden @ ops.remote_load(second, row)]

        start = popxl.constant(0, popxl.int32)
        graph = ir.create_graph(layer, start, x)
        _, y = ops.repeat(graph, layers, start, x)
        ops.host_store(popxl.d2h_stream(y.shape, y.dtype), y)
    return ir


def test_memory_of_intermediate_values_is_near_what_xla_gives():
    session = popxl.Session(perceptron())
    given = session.memory_use()
    plan = session.plan()
    assert (plan.streams, plan.remote) == (given.streams, given.remote)
    assert plan.variables == pytest.approx(given.variables, rel=1e-3)
    assert plan.device_bytes + plan.remote == pytest.approx(
        given.device_bytes + given.remote, rel=0.05
    )


def test_elementwise_values_that_are_used_once_take_no_memory():
    def chain(count: int) -> int:
        ir = popxl.Ir()
        with ir.main_graph:
            x = popxl.variable(np.zeros(1000, np.float32))
            y = x
            for _ in range(count):
                y = ops.tanh(y + x)
            ops.host_store(popxl.d2h_stream((), popxl.float32), ops.sum(y))
        return plan_of(ir).temporaries

    assert chain(2) == chain(9) <= 504, "the partial sums of a folded reduction, and the result"


def test_a_plan_allocates_no_weights():
    """A variable of zeros that share one element takes memory when it is written."""
    ir = popxl.Ir()
    with ir.main_graph:
        buffer = popxl.remote_buffer((2**31,), popxl.float32)
        nothing = np.broadcast_to(np.float32(0), (2**31,))
        before = _resident()
        v = popxl.remote_variable(nothing, buffer)
        ops.remote_store(buffer, 0, ops.remote_load(buffer, 0) + 1)
    assert plan_of(ir).host_bytes == 4 * 2**31 == v._data.nbytes
    assert _resident() - before < 2**28


def _resident() -> int:
    """Bytes of memory that this process really has."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096
