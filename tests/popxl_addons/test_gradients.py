"""Gradients: plain, accumulated, recomputed; against torch."""

import re

import numpy as np
import pytest
import torch

import popxl
from popxl import ops
from popxl._analysis.verify import verify_ir
from popxl_addons import (
    GraphWithNamedArgs,
    Module,
    NamedTensors,
    autodiff,
    autodiff_with_accumulation,
    recompute_graph,
)
from popxl_addons.grad_info import fwd_grad, is_fwd, make_grad_graph_info
from popxl_addons.layers import Linear
from popxl_addons.named_replica_grouping import NamedReplicaGrouping
from popxl_addons.transforms.autodiff import remap_grad_info
from popxl_addons.transforms.repeat_graph import repeat_graph
from tests.popxl.compiled import optimised

MICRO_BATCHES = 2
rng = np.random.default_rng(1)
X = rng.normal(size=(MICRO_BATCHES, 2, 4)).astype(np.float32)
DY = rng.normal(size=(MICRO_BATCHES, 2, 3)).astype(np.float32)
SPEC = popxl.TensorSpec((2, 4), popxl.float32)


class Table(Module):
    def build(self, words):
        weight = self.add_variable_input("weight", lambda: np.zeros((1000, 64)), popxl.float32)
        return ops.gather(weight, words)


class Net(Module):
    def __init__(self):
        super().__init__()
        self.hidden = Linear(5)
        self.out = Linear(3, bias=False)

    def build(self, x):
        return self.out(ops.tanh(self.hidden(x)))


def torch_gradients(weights):
    """Mean gradients of the weights over micro-batches, and the gradient of each input."""
    tensors = {n: torch.tensor(w, requires_grad=True) for n, w in weights.items()}
    x = torch.tensor(X, requires_grad=True)
    hidden = torch.tanh(x @ tensors["hidden.weight"] + tensors["hidden.bias"])
    y = hidden @ tensors["out.weight"]
    (y * torch.tensor(DY)).sum().backward()
    return {n: t.grad.numpy() / MICRO_BATCHES for n, t in tensors.items()}, x.grad.numpy()


@pytest.mark.parametrize(("recompute", "mean"), [(False, True), (True, True), (False, False)])
def test_accumulated_gradients_are_means_or_sums_over_micro_batches(recompute, mean):
    ir = popxl.Ir()
    with ir.main_graph:
        facts, fwd = Net().create_graph(SPEC)
        variables = facts.init()
        x = fwd.graph.inputs[0]
        grad_facts, grad = autodiff_with_accumulation(
            fwd, fwd.args.tensors, grads_required=[x], mean=mean
        )
        counter = ["mean_accum_counter"] if mean else []
        names = ["hidden.bias", "hidden.weight", "out.weight"]  # as their tensors are sorted
        assert grad_facts.keys_flat() == [*(f"accum.{n}" for n in names), *counter]
        assert grad.args.keys_flat() == grad_facts.keys_flat()
        if recompute:
            grad = recompute_graph(grad)
            fwd_inputs = [c.fwd_tensor for c in grad.grad_graph_info.expected_inputs if is_fwd(c)]
            assert set(fwd_inputs) == set(fwd.graph.inputs)
        accumulators = grad_facts.init()
        streams = []
        for i in range(MICRO_BATCHES):
            info = fwd.bind(variables).call_with_info(popxl.constant(X[i]))
            (dx,) = grad.bind(accumulators).call(
                popxl.constant(DY[i]), args=grad.grad_graph_info.inputs_dict(info)
            )
            streams.append(popxl.d2h_stream(dx.shape, dx.dtype))
            ops.host_store(streams[-1], dx)
    with popxl.Session(ir) as session:
        outputs = session.run()
    weights = {n: session.get_tensor_data(t) for n, t in variables.to_dict().items()}
    wanted, dx = torch_gradients(weights)
    np.testing.assert_allclose([outputs[s] for s in streams], dx, rtol=1e-5, atol=1e-6)
    for name, gradient in wanted.items():
        accumulated = session.get_tensor_data(accumulators.accum.get(name))
        wanted_sum = gradient if mean else gradient * MICRO_BATCHES
        np.testing.assert_allclose(accumulated, wanted_sum, rtol=1e-5, atol=1e-6)
    if mean:
        assert session.get_tensor_data(accumulators.mean_accum_counter) == MICRO_BATCHES


@pytest.mark.optimised
def test_the_sum_of_a_tables_gradients_passes_over_no_other_rows():
    """In the compiled program the only op on the whole table is the scatter."""
    ir = popxl.Ir()
    with ir.main_graph:
        facts, fwd = Table().create_graph(popxl.TensorSpec((8,), popxl.int32))
        variables = facts.init()
        grad_facts, grad = autodiff_with_accumulation(fwd, fwd.args.tensors, mean=False)
        words = popxl.constant(np.array([3, 3, 0, 9, 1, 2, 3, 9], np.int32))
        info = fwd.bind(variables).call_with_info(words)
        accumulators = grad_facts.init()
        grad.bind(accumulators).call(
            popxl.constant(np.ones((8, 64), np.float32)),
            args=grad.grad_graph_info.inputs_dict(info),
        )
    session = popxl.Session(ir)
    text = optimised(session)
    assert text.count("scatter(") == 1
    assert not re.search(r"f32\[1000,64\]\S* (add|multiply|broadcast)\(", text)
    with session:
        session.run()
    counts = np.bincount([3, 3, 0, 9, 1, 2, 3, 9], minlength=1000)
    found = session.get_tensor_data(accumulators.accum.weight)
    np.testing.assert_array_equal(found, np.repeat(counts[:, None], 64, 1).astype(np.float32))


def test_accumulators_have_the_type_of_their_tensor_unless_another_is_asked_for():
    half = popxl.TensorSpec((2, 4), popxl.float16)
    ir = popxl.Ir()
    with ir.main_graph:
        _, fwd = Linear(3).create_graph(half)
        facts, grad = autodiff_with_accumulation(fwd, fwd.args.tensors)
        for of in (facts, grad.args):
            assert (of.accum.weight.dtype, of.accum.bias.dtype) == (popxl.float16, popxl.float16)
            assert of.mean_accum_counter.dtype == popxl.float32
        # An accumulator written with the weight's spec serves.
        x = popxl.constant(np.full((2, 4), 0.5, np.float16))
        dy = popxl.constant(np.ones((2, 3), np.float16))
        own = popxl.variable(np.zeros((4, 3), np.float16))
        rest = facts.init()
        rest.insert("accum.weight", own, overwrite=True)
        for _ in range(2):
            info = fwd.bind(NamedTensors(weight=own, bias=rest.accum.bias)).call_with_info(x)
            grad.bind(rest).call(dy, args=grad.grad_graph_info.inputs_dict(info))
        wide, _ = autodiff_with_accumulation(
            fwd, fwd.args.tensors, accumulator_dtype=popxl.float32, mean=False
        )
        assert wide.accum.weight.dtype == popxl.float32
    with popxl.Session(ir) as session:
        session.run()
    found = session.get_tensor_data(own)
    assert found.dtype == np.float16
    np.testing.assert_array_equal(found, 1.0)  # 2 rows * 0.5, the mean of two equal gradients


@pytest.mark.parametrize("prefix", ["", "accum."])
def test_accumulators_take_the_groupings_of_their_variables(prefix):
    ir = popxl.Ir(replication=2)
    with ir.main_graph:
        _, fwd = Linear(3).create_graph(SPEC)
        alone = ir.replica_grouping(group_size=1)
        groups = NamedReplicaGrouping()
        groups.insert(f"{prefix}weight", alone)
        facts, _ = autodiff_with_accumulation(fwd, fwd.args.tensors, replica_groupings=groups)
        assert facts.accum.weight.replica_grouping == alone
        assert facts.accum.bias.replica_grouping == ir.replica_grouping()


def test_an_accumulated_gradient_is_not_returned():
    ir = popxl.Ir()
    with ir.main_graph:
        _, fwd = Net().create_graph(SPEC)
        facts, grad = autodiff_with_accumulation(
            fwd, fwd.args.tensors, grads_required=fwd.graph.inputs
        )
        returned = [c.fwd_tensor for c in grad.grad_graph_info.expected_outputs]
        assert returned == [t for t in fwd.graph.inputs if t not in fwd.args.tensors]
        assert len(grad.graph.outputs) == len(returned) == 1
        assert len(facts.accum.to_dict()) == 3


def test_inputs_of_a_recomputing_graph_have_a_defined_order():
    """Gradients and inputs of the forward graph as the gradient graph has them; the other inputs of
    the forward graph by name; accumulators by name."""
    ir = popxl.Ir()
    spec = popxl.TensorSpec((2,), popxl.float32)
    with ir.main_graph:
        inner = ir.create_graph(
            lambda z, y, x: (ops.tanh(x) * y + z, x + z), *[spec] * 3
        )  # fmt: skip
        fwd = GraphWithNamedArgs(inner, NamedTensors(z=inner.inputs[0], y=inner.inputs[1]))
        z, y, x = inner.inputs
        _, grad = autodiff_with_accumulation(fwd, [z, y], grads_required=[x])
        info = grad.grad_graph_info
        again = recompute_graph(grad)
        kept = [
            (is_fwd(c), c.fwd_tensor)
            for c in info.expected_inputs
            if not is_fwd(c) or c.fwd_tensor in inner.inputs
        ]
        rest = [t for t in (x, y, z) if (True, t) not in kept]
        connections = again.grad_graph_info.expected_inputs
        assert [(is_fwd(c), c.fwd_tensor) for c in connections] == kept + [(True, t) for t in rest]
        assert len(kept) == 3
        assert len(rest) == 2
        others = again.graph.inputs[len(connections) :]
        assert [t.name for t in others] == ["accum.y", "accum.z", "mean_accum_counter"]
        assert again.grad_graph_info.outputs == info.outputs


def test_recomputing_what_prints_prints_twice(capfd):
    ir = popxl.Ir()
    with ir.main_graph:
        x = popxl.constant(np.float32(3))
        fwd = GraphWithNamedArgs(ir.create_graph(lambda t: ops.print_tensor(t, "seen") * t, x))
        grad = recompute_graph(fwd.autodiff())
        info = fwd.call_with_info(x)
        (dx,) = grad.call(popxl.constant(1.0), args=grad.grad_graph_info.inputs_dict(info))
        stream = popxl.d2h_stream((), popxl.float32)
        ops.host_store(stream, dx)
    with popxl.Session(ir) as session:
        assert session.run()[stream] == 6
    assert capfd.readouterr().err.count("seen:") == 2


def _stores(x, total):
    ops.host_store(popxl.d2h_stream(x.shape, x.dtype), x)
    return x * x


def _loads(x, total):
    return x * ops.host_load(popxl.h2d_stream(x.shape, x.dtype))


def _puts_away(x, total):
    ops.remote_store(popxl.remote_buffer(x.shape, x.dtype, 1), 0, x)
    return x * x


def _counts(x, total: popxl.TensorByRef):
    ops.var_updates.accumulate_(total, x)
    return x * x


def _written_by_hand(forward, graph):
    """`graph` as the gradient graph of `forward`, for its first output and input."""
    info = make_grad_graph_info(
        graph, forward, [fwd_grad(forward.outputs[0])], [fwd_grad(forward.inputs[0])]
    )
    return GraphWithNamedArgs.from_grad_graph(info)


@pytest.mark.parametrize("effect", [_stores, _loads, _puts_away, _counts])
def test_recomputing_what_has_an_effect_is_refused(effect):
    ir = popxl.Ir()
    with ir.main_graph:
        inner = ir.create_graph(effect, SPEC, SPEC)
        fwd = ir.create_graph(lambda x, total: ops.call(inner, x, total), SPEC, SPEC)
        written = ir.create_graph(lambda dy: dy * 1.0, SPEC)
        for graph in (inner, fwd):
            grad = _written_by_hand(graph, written)
            if graph is fwd and effect is _counts:  # its change stays inside this graph
                recompute_graph(grad)
                continue
            with pytest.raises(ValueError, match=r"has an effect .* happen twice"):
                recompute_graph(grad)


def test_recomputing_changes_of_its_own_values_and_remote_loads_is_fine():
    def build(x):
        buffer = popxl.remote_buffer(x.shape, x.dtype, 1)
        own = x * 2.0
        ops.add_(own, x)
        return own * ops.remote_load(buffer, 0)

    ir = popxl.Ir()
    with ir.main_graph:
        fwd = ir.create_graph(build, SPEC)
        written = ir.create_graph(lambda dy: dy * 1.0, SPEC)
        grad = recompute_graph(_written_by_hand(fwd, written))
        assert len(grad.graph.inputs) == 2


def test_autodiff_takes_plain_graphs_and_gradients_of_called_graphs():
    ir = popxl.Ir()
    with ir.main_graph:
        inner = ir.create_graph(lambda x: x * x, SPEC)
        tripled = ir.create_graph(lambda dy, x: dy * x * 6.0, SPEC, SPEC)
        template = autodiff(inner).grad_graph_info
        info = remap_grad_info(template, inner, tripled)
        outer = ir.create_graph(lambda x: ops.call(inner, x), SPEC)
        grad = autodiff(outer, called_graphs_grad_info={inner: info})
        assert tripled in grad.graph.called_graphs
        assert tripled not in autodiff(outer).graph.called_graphs


def test_repeat_graph_feeds_outputs_back():
    ir = popxl.Ir()
    with ir.main_graph:
        step = ir.create_graph(lambda x, by: x + by, *[popxl.TensorSpec((), popxl.float32)] * 2)
        body = repeat_graph(step, 5)
        assert step.called_graphs == (body,)
        assert [op.name for op in step.ops] == ["repeat"]
        (y,) = ops.call(step, popxl.constant(1.0), popxl.constant(2.0))
        stream = popxl.d2h_stream((), popxl.float32)
        ops.host_store(stream, y)
    verify_ir(ir)
    with popxl.Session(ir) as session:
        assert session.run()[stream] == 11


@pytest.mark.parametrize("count", [1, 0, -1])
def test_a_graph_that_is_not_repeated_stays_as_it_is(count):
    ir = popxl.Ir()
    with ir.main_graph:
        ops.var_updates.accumulate_(popxl.variable(0.0), popxl.constant(1.0))
    before = ir.main_graph.ops
    assert repeat_graph(ir.main_graph, count) is ir.main_graph
    assert ir.main_graph.ops == before


def test_the_main_graph_is_repeated_with_its_variables_and_streams():
    ir, count = popxl.Ir(), 4
    with ir.main_graph:
        total, first = popxl.variable(0.0, name="total"), popxl.variable(3.0, name="first")
        stream = popxl.h2d_stream((), popxl.float32, "x")
        x = ops.host_load(stream)
        ops.var_updates.accumulate_(total, x * first + popxl.constant(1.0))

        def add_one(v: popxl.TensorByRef):
            ops.add_(v, popxl.constant(1.0))

        ops.call(ir.create_graph(add_one, first), first)
        out = popxl.d2h_stream((), popxl.float32)
        ops.host_store(out, total)
    ops_before = len(ir.main_graph.ops)
    body = repeat_graph(ir.main_graph, count)
    ir.num_host_transfers = count
    assert [op.name for op in ir.main_graph.ops] == ["repeat"]
    assert len(body.ops) == ops_before
    assert ir.main_graph.variables == (total, first)
    verify_ir(ir)
    xs = np.arange(1, count + 1, dtype=np.float32)
    with popxl.Session(ir) as session:
        found = session.run({stream: xs})[out]
    np.testing.assert_array_equal(found, np.cumsum(xs * (3 + np.arange(count)) + 1))
    assert session.get_tensor_data(first) == 3 + count


def test_outputs_that_do_not_fit_the_inputs_are_refused_before_anything_is_changed():
    ir = popxl.Ir()
    with ir.main_graph:
        graph = ir.create_graph(lambda x: ops.sum(x), SPEC)
        with pytest.raises(ValueError, match="must fit its first inputs"):
            repeat_graph(graph, 2)
        assert [op.name for op in graph.ops] == ["sum"]


def test_graphs_made_by_transforms_verify():
    ir = popxl.Ir()
    with ir.main_graph:
        _, fwd = Net().create_graph(SPEC)
        _, grad = autodiff_with_accumulation(fwd, fwd.args.tensors)
        recompute_graph(grad)
        assert isinstance(grad.args.accum, NamedTensors)
    verify_ir(ir)
