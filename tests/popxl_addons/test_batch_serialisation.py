"""Phased training of a stack of layers, against the same computation in one piece in torch."""

import itertools

import numpy as np
import pytest
import torch

import popxl
from popxl import ops
from popxl_addons import (
    GraphWithNamedArgs,
    Module,
    NamedTensors,
    autodiff_with_accumulation,
    recompute_graph,
)
from popxl_addons import host_store as addons_store
from popxl_addons.layers import Linear
from popxl_addons.remote import load_remote_graph, named_variable_buffers
from popxl_addons.transforms.batch_serialisation import (
    RemoteHandle,
    batch_serial_buffer,
    batch_serialise,
    batch_serialise_fwd_and_grad,
)
from tests.slow import slow

STEPS, LAYERS, BATCH, WIDTH = 3, 2, 2, 4
rng = np.random.default_rng(2)
X = rng.normal(size=(STEPS, BATCH, WIDTH)).astype(np.float32)
DY = rng.normal(size=(STEPS, BATCH, WIDTH)).astype(np.float32)
SPEC = popxl.TensorSpec((BATCH, WIDTH), popxl.float32)


class Layer(Module):
    def __init__(self):
        super().__init__()
        self.linear = Linear(WIDTH)

    def build(self, x):
        return ops.sin(self.linear(x))


def weights(variables):
    """Small fixed values, other ones for each layer."""
    draw = np.random.default_rng(3)
    return {t: draw.normal(0, 0.5, t.shape_on_host).astype(np.float32) for t in variables}


def in_torch(variables, data):
    """Outputs, gradients of the inputs, and mean gradients of the variables."""
    params = [
        {n: torch.tensor(data[t], requires_grad=True) for n, t in v.to_dict().items()}
        for v in variables
    ]
    x = y = torch.tensor(X, requires_grad=True)
    for p in params:
        y = torch.sin(y @ p["linear.weight"] + p["linear.bias"])
    (y * torch.tensor(DY)).sum().backward()
    grads = [{n: t.grad.numpy() / STEPS for n, t in p.items()} for p in params]
    return y.detach().numpy(), x.grad.numpy(), grads


class Phased:
    """A stack of `LAYERS` layers, one after the other, forwards and backwards.

    The first row of `x` holds the input, row i + 1 the output of layer i; `dx` likewise.
    """

    def __init__(self, replication=1, recompute=True, io_mode="io", shard=False):
        self.ir = ir = popxl.Ir(replication)
        ir.num_host_transfers = STEPS
        with ir.main_graph:
            self.group = ir.replica_grouping() if shard else None
            self.facts, fwd = Layer().create_graph(SPEC)
            x, y = fwd.graph.inputs[0], fwd.graph.outputs[0]
            grad_facts, grad = autodiff_with_accumulation(fwd, fwd.args.tensors, [y], [x])
            if recompute:
                grad = recompute_graph(grad)
            self.x, self.dx = (
                batch_serial_buffer(x, STEPS, LAYERS + 1, self.group) for _ in range(2)
            )
            (dx,) = grad.graph.outputs
            self.fwd, self.bwd = batch_serialise_fwd_and_grad(
                fwd,
                grad,
                fwd.args,
                STEPS,
                load_handles={x: self.at(self.x, 0), grad.graph.inputs[0]: self.at(self.dx, 1)},
                store_streams={},
                store_buffers={y: self.at(self.x, 1), dx: self.at(self.dx, 0)},
                rows=LAYERS,
                io_mode=io_mode,
            )
            self.build(grad_facts)

    def at(self, buffer, offset):
        return RemoteHandle(buffer, offset, self.group)

    def build(self, grad_facts):
        buffers = named_variable_buffers(self.facts, LAYERS, False)
        self.variables = [self.facts.init_remote(buffers, i, f"layer{i}") for i in range(LAYERS)]
        self.accumulators = [grad_facts.init(f"layer{i}") for i in range(LAYERS)]
        load, names = load_remote_graph(buffers)
        self.inputs = [self.feed(self.x, 0), self.feed(self.dx, LAYERS)]
        for i in range(LAYERS):
            layer = NamedTensors.pack(names, load.call(i))
            self.fwd.graph.bind(layer).call(i)
        for i in reversed(range(LAYERS)):
            layer = NamedTensors.pack(names, load.call(i))
            layer.update(self.accumulators[i])
            self.bwd.graph.bind(layer).call(i)
        self.outputs = [self.read(self.x, LAYERS), self.read(self.dx, 0)]

    def through(self, shape, loads, stores):
        """Serialise the identity."""
        graph = popxl.gir().create_graph(lambda t: t * 1.0, popxl.TensorSpec(shape, popxl.float32))
        t, out = graph.inputs[0], graph.outputs[0]
        to_stream = isinstance(stores, popxl.DeviceToHostStream)
        result = batch_serialise(
            GraphWithNamedArgs(graph),
            STEPS,
            {t: loads},
            {out: stores} if to_stream else {},
            {} if to_stream else {out: stores},
        )
        result.graph.call(0)

    def feed(self, buffer, row):
        stream = popxl.h2d_stream(SPEC.shape, SPEC.dtype)
        self.through(SPEC.shape, stream, self.at(buffer, row))
        return stream

    def read(self, buffer, row):
        stream = popxl.d2h_stream(SPEC.shape, SPEC.dtype)
        self.through(SPEC.shape, self.at(buffer, row), stream)
        return stream

    def check(self):
        replicas = self.ir.replication_factor
        data = weights(list(itertools.chain(*(v.tensors for v in self.variables))))
        y, dx, grads = in_torch(self.variables, data)
        feeds = [x if replicas == 1 else np.repeat(x[:, None], replicas, 1) for x in (X, DY)]
        with popxl.Session(self.ir) as session:
            session.write_variables_data(data)
            out = session.run(dict(zip(self.inputs, feeds, strict=True)))
        for stream, wanted in zip(self.outputs, (y, dx), strict=True):
            result = out[stream] if replicas == 1 else out[stream][:, -1]
            np.testing.assert_allclose(result, wanted, rtol=1e-4, atol=1e-5)
        for accumulators, wanted in zip(self.accumulators, grads, strict=True):
            for name, gradient in wanted.items():
                found = session.get_tensor_data(accumulators.accum.get(name))
                np.testing.assert_allclose(found, gradient, rtol=1e-4, atol=1e-5)
            assert session.get_tensor_data(accumulators.mean_accum_counter) == STEPS


@pytest.mark.parametrize(
    ("recompute", "io_mode"),
    [(True, "io_overlapped"), (False, "compute"), slow(True, "compute"),
     slow(False, "io_overlapped"), slow(True, "io"), slow(False, "io")],
)  # fmt: skip
def test_a_phased_stack_computes_what_the_whole_does(recompute, io_mode):
    phased = Phased(recompute=recompute, io_mode=io_mode)
    phased.check()
    # Without recomputation the argument of the sine goes through a buffer of its own.
    assert len(phased.fwd.stored_buffers) == (1 if recompute else 2)


def test_activations_may_be_cut_over_replicas():
    phased = Phased(replication=2, shard=True)
    assert phased.x.tensor_shape == (BATCH * WIDTH // 2,)
    phased.check()


# ---- details ------------------------------------------------------------------------------------
def named(graph):
    return GraphWithNamedArgs(graph)


def test_rows_may_be_computed_from_the_row_index():
    ir = popxl.Ir()
    with ir.main_graph:
        scalar = popxl.TensorSpec((), popxl.float32)
        graph = ir.create_graph(lambda t, by: t + by, scalar, scalar)
        t, by = graph.inputs
        buffer = batch_serial_buffer(t, steps=2, rows=3)
        result = batch_serialise(
            named(graph), 2, {t: (buffer, 0)}, {},
            {graph.outputs[0]: RemoteHandle(buffer, lambda row: 2 - row)}, rows=3,
        )  # fmt: skip
        assert len(result.graph.graph.inputs) == 2
        remapped = result.remap_tensors(NamedTensors(by=by))
        assert remapped.by is result.graph.graph.inputs[1]
        result.graph.call(0, 1.0)  # row 0 -> row 2
        result.graph.call(2, 1.0)  # row 2 -> row 0
        result.graph.call(0, 1.0)
        streams = [popxl.d2h_stream((), popxl.float32) for _ in range(6)]
        for i, stream in enumerate(streams):
            ops.host_store(stream, ops.remote_load(buffer, i))
    with popxl.Session(ir) as session:
        out = session.run()
    assert [out[s] for s in streams] == [2, 2, 0, 0, 3, 3]


@pytest.mark.parametrize("rows", [1, 3])
def test_inputs_are_the_row_the_seed_and_the_rest_in_order(rows):
    ir = popxl.Ir()
    with ir.main_graph:
        scalar, seed = popxl.TensorSpec((), popxl.float32), popxl.TensorSpec((2,), popxl.uint32)

        def build(a, x, s, b):
            return x * a + b + ops.random_uniform(s, ())

        graph = ir.create_graph(build, scalar, scalar, seed, scalar)
        a, x, s, b = graph.inputs
        stream = popxl.h2d_stream((), popxl.float32)
        result = batch_serialise(named(graph), 2, {x: stream}, {}, {}, seed_input=s, rows=rows)
        row, *others = result.graph.graph.inputs
        assert (row.shape, row.dtype) == ((), popxl.int32)
        assert (others[0].shape, others[0].dtype) == ((2,), popxl.uint32)
        remapped = result.remap_tensors(NamedTensors(a=a, b=b, s=s))
        assert others == [remapped.s, remapped.a, remapped.b]


def with_dropout(ir, named_inputs):
    """Dropout of x * w + table, serialised; `named_inputs(x, w, table, seed)` are named."""
    vector, seed = popxl.TensorSpec((4,), popxl.float32), popxl.TensorSpec((2,), popxl.uint32)

    def build(x, w, table, s):
        return ops.dropout(ops.tanh(x * w + table), s, p=0.5)

    fwd = named(ir.create_graph(build, vector, vector, vector, seed))
    x, w, table, s = fwd.graph.inputs
    fwd.args.insert("w", w)
    _, grad = autodiff_with_accumulation(fwd, [w], grads_required=[x])
    grad = recompute_graph(grad)
    x_buffer, dx_buffer = (batch_serial_buffer(x, STEPS, 2) for _ in range(2))
    f, b = batch_serialise_fwd_and_grad(
        fwd, grad, named_inputs(x, w, table, s), STEPS,
        load_handles={x: (x_buffer, 0), grad.graph.inputs[0]: (dx_buffer, 1)},
        store_streams={}, store_buffers={grad.graph.outputs[0]: (dx_buffer, 0)},
        seed_input=s, rows=2,
    )  # fmt: skip
    return fwd.graph.inputs, f, b


def test_the_gradient_graph_takes_the_row_and_named_arguments_and_nothing_else():
    """Passed-through inputs and the seed of a step are stored by the forward graph."""
    ir = popxl.Ir()
    with ir.main_graph:
        (_, _, table, s), f, b = with_dropout(ir, lambda x, w, table, s: NamedTensors(w=w))
        assert [t.dtype for t in f.graph.graph.inputs[:2]] == [popxl.int32, popxl.uint32]
        assert set(f.stored_buffers) == {table, s}
        assert f.stored_buffers[s].buffer.tensor_shape == (2,)
        assert f.stored_buffers[s].buffer.entries == 2 * STEPS
        row, *others = b.graph.graph.inputs
        assert (row.dtype, row.shape) == (popxl.int32, ())
        assert set(others) == set(b.graph.args.tensors)
        assert b.graph.args.keys_flat() == ["w", "accum.w", "mean_accum_counter"]


def test_named_inputs_of_the_forward_graph_come_first_and_a_named_seed_is_not_stored():
    ir = popxl.Ir()
    with ir.main_graph:
        _, f, b = with_dropout(
            ir, lambda x, w, table, s: NamedTensors(seed=s, unused=x, table=table, w=w)
        )
        assert f.stored_buffers == {}
        found = ["seed", "table", "w", "accum.w", "mean_accum_counter"]
        assert [n for n in b.graph.args.keys_flat() if n != "unused"] == found


def test_a_gradient_without_a_handle_is_refused():
    ir = popxl.Ir()
    with ir.main_graph:
        fwd = named(ir.create_graph(lambda x: x * x, SPEC))
        stream = popxl.h2d_stream(SPEC.shape, SPEC.dtype)
        with pytest.raises(ValueError, match="where the gradient of .* comes from"):
            batch_serialise_fwd_and_grad(
                fwd, fwd.autodiff(), NamedTensors(), 2, {fwd.graph.inputs[0]: stream}, {}, {}
            )


def test_a_step_s_entry_follows_from_its_row():
    """Row r at offset o: (r + o) * steps + i; None: i; f: f(r) * steps + i."""
    ir, steps = popxl.Ir(), 2
    with ir.main_graph:
        scalar = popxl.TensorSpec((), popxl.float32)
        buffer = popxl.remote_buffer((), popxl.float32, 12)
        offsets = [0, 2, None, lambda row: row * 2 + 1]
        found = []
        for i, offset in enumerate(offsets):
            copy = ir.create_graph(lambda t: t * 1.0, scalar)
            handle = (buffer, offset) if i % 2 else RemoteHandle(buffer, offset)
            result = batch_serialise(named(copy), steps, {}, {}, {copy.outputs[0]: handle}, rows=3)
            for entry in range(12):
                ops.remote_store(buffer, entry, popxl.constant(0.0, popxl.float32))
            result.graph.call(popxl.constant(2, popxl.int32) if i else 2, 1.0)
            values = [ops.remote_load(buffer, e).reshape((1,)) for e in range(12)]
            found.append(popxl.d2h_stream((12,), popxl.float32))
            ops.host_store(found[-1], ops.concat(values))
    with popxl.Session(ir) as session:
        out = session.run()
    at = [np.flatnonzero(out[s]).tolist() for s in found]
    assert at == [[4, 5], [8, 9], [0, 1], [10, 11]]


@pytest.mark.parametrize("replication", [1, 2])
def test_what_is_stored_may_be_added_to_what_is_there(replication):
    """The gradient of a value that several layers read; with shards of entries too."""
    ir, steps = popxl.Ir(replication), 2
    with ir.main_graph:
        group = ir.replica_grouping() if replication > 1 else None
        buffer = batch_serial_buffer(popxl.constant(X[0]), steps, rows=1, shard_group=group)
        total = RemoteHandle(buffer, None, group, adds=True)
        graph = ir.create_graph(lambda t: t * 1.0, SPEC)
        loop = batch_serialise(named(graph), steps, {}, {}, {graph.outputs[0]: total}, rows=3)
        for row, value in enumerate(X):
            loop.graph.call(row, popxl.constant(value))
        out = popxl.d2h_stream(SPEC.shape, SPEC.dtype)
        ir.num_host_transfers = steps
        copy = ir.create_graph(lambda t: t * 1.0, SPEC)
        batch_serialise(
            named(copy), steps, {copy.inputs[0]: RemoteHandle(buffer, None, group)},
            {copy.outputs[0]: out}, {},
        ).graph.call(0)  # fmt: skip
    with popxl.Session(ir) as session:
        found = session.run()[out].reshape(steps, -1, *SPEC.shape)
    np.testing.assert_array_equal(found, np.broadcast_to(X[0] + X[1] + X[2], found.shape))


@pytest.mark.parametrize(
    ("before", "offset", "entries"),
    [(1, 0, 6), (1, 1, 8), (20, None, 2), (1, lambda row: row, 6),
     slow(20, 0, 6), slow(20, 1, 8), slow(1, None, 2), slow(20, lambda row: row, 6)],
)  # fmt: skip
def test_buffers_grow_to_what_is_used(before, offset, entries):
    ir = popxl.Ir()
    with ir.main_graph:
        spec = popxl.TensorSpec((), popxl.float32)
        source, target = (popxl.remote_buffer((), popxl.float32, before) for _ in range(2))
        graph = ir.create_graph(lambda t: t + 1.0, spec)
        load, store = {graph.inputs[0]: (source, offset)}, {graph.outputs[0]: (target, offset)}
        result = batch_serialise(named(graph), 2, load, {}, store, rows=3)
        assert source.entries == target.entries == max(before, entries)
        result.graph.call(0)
        target.entries = 30  # more, now that it is written to
        last = addons_store(ops.remote_load(target, 29))
    with popxl.Session(ir) as session:
        assert session.run()[last] == 0


def test_steps_draw_their_own_numbers_alike_forwards_and_backwards():
    ir = popxl.Ir()
    ir.num_host_transfers = STEPS
    with ir.main_graph:
        ones = popxl.TensorSpec((64,), popxl.float32)
        seed = popxl.TensorSpec((2,), popxl.uint32)
        fwd = named(ir.create_graph(lambda x, s: ops.dropout(x, s, p=0.5), ones, seed))
        x, s = fwd.graph.inputs
        (y,) = fwd.graph.outputs
        grad = recompute_graph(fwd.autodiff(grads_required=[x]))
        data = popxl.h2d_stream(ones.shape, ones.dtype)
        d_data = popxl.h2d_stream(ones.shape, ones.dtype)
        outs = [popxl.d2h_stream(ones.shape, ones.dtype) for _ in range(2)]
        f, b = batch_serialise_fwd_and_grad(
            fwd, grad, NamedTensors(), STEPS,
            load_handles={x: data, grad.graph.inputs[0]: d_data},
            store_streams={y: outs[0], grad.graph.outputs[0]: outs[1]},
            store_buffers={}, seed_input=s,
        )  # fmt: skip
        assert set(f.stored_buffers) == {x, s}  # kept for the backward pass
        f.graph.call(0, popxl.constant(np.array([1, 2], np.uint32)))
        b.graph.call(0)
    data_in = np.ones((STEPS, 64), np.float32)
    with popxl.Session(ir) as session:
        out = session.run({data: data_in, d_data: data_in})
    y_data, dx = (out[s] for s in outs)
    np.testing.assert_array_equal(y_data, dx)
    assert not np.array_equal(y_data[0], y_data[1])
    assert 0.3 < (y_data == 0).mean() < 0.7


def test_a_group_asks_for_a_sharded_buffer():
    ir = popxl.Ir(replication=2)
    with ir.main_graph:
        fwd = named(ir.create_graph(lambda x: ops.exp(x), SPEC))
        grad = fwd.autodiff()
        (y,) = fwd.graph.outputs
        stream = popxl.h2d_stream(SPEC.shape, SPEC.dtype)
        f, _ = batch_serialise_fwd_and_grad(
            fwd, grad, NamedTensors(), STEPS,
            load_handles={fwd.graph.inputs[0]: stream, grad.graph.inputs[0]: stream},
            store_streams={}, store_buffers={y: ir.replica_grouping()},
        )  # fmt: skip
        assert f.stored_buffers[y].buffer.tensor_shape == (BATCH * WIDTH // 2,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"io_mode": "fast"}, "unknown io_mode"),
        ({"steps": 0}, "at least 1"),
        ({"wrong_key": True}, "cannot be used with graph"),
    ],
)
def test_wrong_arguments_are_told(change, message):
    ir = popxl.Ir()
    with ir.main_graph:
        graph = ir.create_graph(lambda x: x * 1.0, SPEC)
        key = ir.create_graph(lambda x: x, SPEC).inputs[0] if "wrong_key" in change else None
        stream = popxl.h2d_stream(SPEC.shape, SPEC.dtype)
        with pytest.raises(ValueError, match=message):
            batch_serialise(
                named(graph), change.get("steps", 2), {key or graph.inputs[0]: stream}, {}, {},
                io_mode=change.get("io_mode", "io"),
            )  # fmt: skip


def test_graphs_must_belong_together():
    ir = popxl.Ir()
    with ir.main_graph:
        fwd, other = (named(ir.create_graph(lambda x: x * 2.0, SPEC)) for _ in range(2))
        with pytest.raises(ValueError, match="no gradient graph of"):
            batch_serialise_fwd_and_grad(fwd, other.autodiff(), NamedTensors(), 2, {}, {}, {})
