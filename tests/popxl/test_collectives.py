"""Collectives on 8 replicas, in groups of any form, against numpy."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

import popxl
from popxl import ops
from popxl._ir.sharding import shard_elements
from popxl.ops.collectives import (
    replica_sharded_slice,
    replicated_all_gather,
    replicated_all_reduce,
    replicated_all_reduce_,
    replicated_reduce_scatter,
    replicated_slice,
)
from popxl.transforms import autodiff
from tests.popxl.compiled import optimised
from tests.popxl.programs import f32, run
from tests.slow import slow

pytestmark = pytest.mark.usefixtures("compiled_quickly")

R = 8
SHAPE = (4, 3)  # 12 elements: shards of 8 replicas need padding
GROUPINGS = {
    "all": [0] * 8,
    "each": list(range(8)),
    "neighbours": [0, 0, 1, 1, 2, 2, 3, 3],
    "strided": [0, 1, 0, 1, 0, 1, 0, 1],
    "strided pairs": [0, 1, 0, 1, 2, 3, 2, 3],
}
BY_NAME = pytest.mark.parametrize("name", GROUPINGS)


def _members(name: str) -> list[list[int]]:
    """The group of each replica, as a list of replicas."""
    table = GROUPINGS[name]
    return [[r for r in range(R) if table[r] == table[mine]] for mine in range(R)]


def _grouping(name: str) -> popxl.ReplicaGrouping:
    return popxl.gir().replica_grouping_from_assignments(GROUPINGS[name])


def _per_replica(name: str, fn: Callable[[np.ndarray, int], np.ndarray], x: np.ndarray):
    """`fn(values of the group in rank order, own rank)` on each replica."""
    groups = _members(name)
    return np.stack([fn(x[groups[r]], groups[r].index(r)) for r in range(R)])


def _flat_shards(whole: np.ndarray, count: int) -> np.ndarray:
    """The elements, padded with zeros, cut into `count` rows."""
    size = -(-whole.size // count)
    return np.pad(whole.ravel(), (0, size * count - whole.size)).reshape(count, size)


REDUCTIONS = {
    "add": lambda xs: xs.sum(0),
    "mean": lambda xs: xs.mean(0),
    "mul": lambda xs: xs.prod(0),
    "min": lambda xs: xs.min(0),
    "max": lambda xs: xs.max(0),
    "square_add": lambda xs: (xs**2).sum(0),
}
X = f32(R, *SHAPE)


@pytest.mark.parametrize(
    "name", ["all", slow("each"), slow("neighbours"), slow("strided"), "strided pairs"]
)
def test_reductions_gathers_scatters_and_slices(name):
    size = len(_members(name)[0])

    def build(x):
        group = _grouping(name)
        changed = ops.identity(x)
        in_place = replicated_all_reduce_(changed, "add", group)
        return [
            *(replicated_all_reduce(x, op, group) for op in REDUCTIONS),
            *(replicated_reduce_scatter(x, op, group) for op in REDUCTIONS),
            replicated_all_gather(x, 0, group),
            replicated_all_gather(x, 1, group, "concat"),
            replicated_all_gather(x, -1, group, "new_axis"),
            replica_sharded_slice(x, group),
            replicated_all_gather(replica_sharded_slice(x, group), group=group),
            in_place + 1.0,
            changed * 1.0,
        ]

    found = iter(run(build, X, replicas=R))
    for reduce in REDUCTIONS.values():
        expected = _per_replica(name, lambda xs, rank, f=reduce: f(xs), X)
        np.testing.assert_allclose(next(found), expected, rtol=1e-5, atol=1e-6)
    for reduce in REDUCTIONS.values():
        expected = _per_replica(name, lambda xs, rank, f=reduce: _flat_shards(f(xs), size)[rank], X)
        np.testing.assert_allclose(next(found), expected, rtol=1e-5, atol=1e-6)
    expectations = [
        lambda xs, rank: np.concatenate(xs, 0),
        lambda xs, rank: np.concatenate(xs, 1),
        lambda xs, rank: np.stack(xs, -1),
        lambda xs, rank: _flat_shards(xs[rank], size)[rank],
        lambda xs, rank: np.concatenate(
            [_flat_shards(x, size)[i] for i, x in enumerate(xs)]
        )[: X[0].size].reshape(SHAPE),
        lambda xs, rank: xs.sum(0) + 1,
        lambda xs, rank: xs.sum(0),
    ]  # fmt: skip
    for expected in expectations:
        np.testing.assert_allclose(
            next(found), _per_replica(name, expected, X), rtol=1e-5, atol=1e-6
        )


def test_logical_reductions_and_integers():
    flags = np.arange(R * 3).reshape(R, 3) % 5 > 0
    numbers = np.arange(R * 3, dtype=np.int32).reshape(R, 3)

    def build(flags, numbers):
        return [replicated_all_reduce(flags, "and"), replicated_all_reduce(flags, "or"),
                replicated_all_reduce(numbers), replicated_all_reduce(numbers, "max")]  # fmt: skip

    found = run(build, flags, numbers, replicas=R)
    expected = [flags.all(0), flags.any(0), numbers.sum(0), numbers.max(0)]
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, np.broadcast_to(b, a.shape))


@BY_NAME
def test_slices_along_an_axis(name):
    size = len(_members(name)[0])
    x = f32(R, 2, 8, 3)

    def build(x):
        return replicated_slice(x, 1, _grouping(name))

    def own(xs, rank):
        part = np.split(xs[rank], size, axis=1)[rank]
        return part.squeeze(1) if part.shape[1] == 1 else part

    expected = _per_replica(name, own, x)
    np.testing.assert_array_equal(run(build, x, replicas=R)[0], expected)


def test_scalars_are_gathered_to_vectors():
    x = f32(R)

    def build(x):
        return [replicated_all_gather(x), replicated_all_gather(x, output_shape="new_axis"),
                replicated_reduce_scatter(x)]  # fmt: skip

    concat, stacked, shard = run(build, x, replicas=R)
    np.testing.assert_array_equal(concat, np.tile(x, (R, 1)))
    np.testing.assert_array_equal(stacked, np.tile(x, (R, 1)))
    np.testing.assert_allclose(shard[:, 0], [x.sum(), *[0] * 7], rtol=1e-6)


def test_a_marked_shard_is_gathered_to_its_whole_shape():
    def build(x):
        shard = replicated_reduce_scatter(x, configure_output_for_replicated_tensor_sharding=True)
        assert (shard.shape, shard.meta_shape) == ((2,), SHAPE)
        scaled = ops.add(shard, shard)
        assert scaled.meta_shape == SHAPE
        return replicated_all_gather(scaled)

    (found,) = run(build, X, replicas=R)
    np.testing.assert_allclose(found, np.tile(2 * X.sum(0), (R, 1, 1)), rtol=1e-5, atol=1e-6)


# ---- gradients ----------------------------------------------------------------------------------
LINEAR = {
    "all_reduce": (replicated_all_reduce, lambda xs, rank: xs.sum(0)),
    "all_reduce mean": (
        lambda x, group: replicated_all_reduce(x, "mean", group), lambda xs, rank: xs.mean(0),
    ),
    "reduce_scatter": (
        replicated_reduce_scatter, lambda xs, rank: _flat_shards(xs.sum(0), len(xs))[rank],
    ),
    "reduce_scatter mean": (
        lambda x, group: replicated_reduce_scatter(x, "mean", group),
        lambda xs, rank: _flat_shards(xs.mean(0), len(xs))[rank],
    ),
}  # fmt: skip


def _call(op, x, group):
    return op(x, group=group)


def _gradients(op, x, group, seed):
    """x -> output, seed -> gradient of x, through a graph of its own."""
    graph = popxl.gir().create_graph(lambda t: _call(op, t, group), x)
    info = autodiff(graph)
    call = ops.call_with_info(graph, x)
    (grad,) = ops.call(info.graph, seed, inputs_dict=info.inputs_dict(call))
    return [call.outputs[0], grad]


@pytest.mark.parametrize("name", ["all", slow("strided"), "strided pairs"])
def test_gradients_are_those_of_the_sum_of_all_replicas_losses(name):
    """With y = M x over all replicas' elements, the gradient is the transpose of M."""
    outputs = [_per_replica(name, reference, X) for _, reference in LINEAR.values()]
    seeds = [f32(*y.shape, seed=i) for i, y in enumerate(outputs)]

    def build(x, *seeds):
        group = _grouping(name)
        pairs = zip(LINEAR.values(), seeds, strict=True)
        return [t for (op, _), seed in pairs for t in _gradients(op, x, group, seed)]

    found = iter(run(build, X, *seeds, replicas=R))
    for (_, reference), y, seed in zip(LINEAR.values(), outputs, seeds, strict=True):
        np.testing.assert_allclose(next(found), y, rtol=1e-5, atol=1e-6)
        basis = np.eye(X.size, dtype=np.float64).reshape(X.size, *X.shape)
        columns = [_per_replica(name, reference, e).ravel() for e in basis]
        expected = (np.array(columns) @ seed.ravel()).reshape(X.shape)
        np.testing.assert_allclose(next(found), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("all", "meta_shape"), ("strided", "concat"), ("strided", "new_axis"), ("each", "meta_shape"),
     slow("all", "concat"), slow("all", "new_axis"), slow("strided", "meta_shape"),
     slow("each", "concat"), slow("each", "new_axis")],
)  # fmt: skip
def test_the_gradient_of_a_gather_is_the_own_slice_and_nothing_is_summed(name, shape):
    size = len(_members(name)[0])
    grads = {
        "concat": f32(R, 4, 3 * size, seed=1),
        "new_axis": f32(R, 4, size, 3, seed=1),
        "meta_shape": f32(R, 5, 2, seed=1),
    }[shape]
    part = f32(R, -(-10 // size)) if shape == "meta_shape" else X

    def build(x, dy):
        group = _grouping(name)
        meta = (5, 2) if shape == "meta_shape" else None
        graph = popxl.gir().create_graph(
            lambda t: replicated_all_gather(t, 1 if meta is None else 0, group, shape),
            popxl.TensorSpec(x.shape, x.dtype, meta or ()),
        )
        info = autodiff(graph)
        return ops.call(info.graph, dy)

    (found,) = run(build, part, grads, replicas=R)
    for r, members in enumerate(_members(name)):
        rank = members.index(r)
        expected = {
            "concat": lambda dy, i=rank: dy[:, 3 * i : 3 * i + 3],
            "new_axis": lambda dy, i=rank: dy[:, i],
            "meta_shape": lambda dy, i=rank: _flat_shards(dy, size)[i],
        }[shape](grads[r])
        np.testing.assert_array_equal(found[r], expected)


def test_slices_of_an_identical_tensor_have_its_whole_gradient():
    """The input is the same on the replicas of a group, so its gradient is as well: all slices'."""
    x = np.tile(f32(1, 4, 2), (R, 1, 1))
    flat, rows = f32(R, 1, seed=1), f32(R, 2, 2, seed=2)

    def build(x, flat, rows):
        pairs = popxl.gir().replica_grouping(stride=4, group_size=2)
        return [_gradients(replica_sharded_slice, x, popxl.gir().replica_grouping(), flat)[1],
                _gradients(replicated_slice, x, pairs, rows)[1]]  # fmt: skip

    whole, halves = run(build, x, flat, rows, replicas=R)
    np.testing.assert_array_equal(whole, np.tile(flat.reshape(1, 4, 2), (R, 1, 1)))
    for r in range(R):
        np.testing.assert_array_equal(halves[r], np.concatenate([rows[r % 4], rows[r % 4 + 4]]))


@pytest.mark.parametrize("dtype", [np.float16, popxl.bfloat16.as_numpy()])
def test_half_types_are_summed_in_float32(dtype):
    """30000 + 30000 is no float16, and 256 + 1 no bfloat16; their means are."""
    x = np.array([30000.0] * 4, dtype)
    y = np.array([256, 1, 1, 1], dtype)

    def build(x, y):
        mean = [replicated_all_reduce(t, "mean") for t in (x, y)]
        return [*mean, replicated_reduce_scatter(y.reshape((1,)), "add"),
                replicated_all_reduce(x * 0.01, "mul")]  # fmt: skip

    large, small, added, product = run(build, x, y, replicas=4)
    assert large.dtype == dtype
    np.testing.assert_array_equal(large, x)
    np.testing.assert_array_equal(small, np.full(4, np.mean(y.astype(np.float64)), dtype))
    assert added[0] == dtype.type(259) if dtype is not np.float16 else added[0] == 259
    assert product.dtype == dtype


def test_a_grouping_without_stride_is_refused_and_its_const_grouping_is_not():
    ir = popxl.Ir(8)
    grouping = ir.replica_grouping_from_assignments([0, 0, 1, 1, 1, 1, 0, 0])
    with ir.main_graph:
        x = popxl.variable(X[0])
        for op in (replicated_all_reduce, replicated_all_gather, replicated_reduce_scatter,
                   replica_sharded_slice, replicated_slice):  # fmt: skip
            with pytest.raises(NotImplementedError, match="const_rg"):
                op(x, group=grouping)
        assert replicated_all_gather(x, group=grouping.const_rg).shape == (8, 3)


def test_reductions_without_gradient_say_so():
    ir = popxl.Ir(2)
    with ir.main_graph:
        x = popxl.variable(X[0])
        for op in (replicated_all_reduce, replicated_reduce_scatter):
            graph = ir.create_graph(lambda t, op=op: op(t, "max"), x)
            with pytest.raises(NotImplementedError, match="max|only add and mean"):
                autodiff(graph)


# ---- errors -------------------------------------------------------------------------------------
def test_wrong_arguments_are_errors():
    ir, other = popxl.Ir(4), popxl.Ir(2)
    with ir.main_graph:
        x = popxl.variable(X[0], name="x")
        with pytest.raises(ValueError, match="unknown reduction 'sum': use one of add"):
            replicated_all_reduce(x, "sum")
        with pytest.raises(ValueError, match="grouping is for 2 replicas, but the Ir has 4"):
            replicated_all_reduce(x, group=other.replica_grouping())
        with pytest.raises(ValueError, match="axis 2 is out of range"):
            replicated_all_gather(x, 2)
        with pytest.raises(ValueError, match="is no shard"):
            replicated_all_gather(x, output_shape="meta_shape")
        with pytest.raises(ValueError, match="unknown output_shape"):
            replicated_all_gather(x, output_shape="rows")
        with pytest.raises(ValueError, match="axis 1 of size 3 cannot be cut into 4 slices"):
            replicated_slice(x, 1)


# ---- one program, many places -------------------------------------------------------------------
def test_collectives_work_in_loops_branches_and_called_graphs():
    def build(x):
        ir = popxl.gir()
        pairs = ir.replica_grouping(group_size=2)
        graph = ir.create_graph(lambda t: replicated_all_reduce(t, "mean", pairs) + 1.0, x)
        branch = ir.create_graph(lambda t: replicated_all_reduce(t, "max"), x)
        (looped,) = ops.repeat(graph, 3, x)
        yes = popxl.constant(True)
        return [*ops.call(graph, looped), *ops.conditional(yes, branch, graph, [x], [x])]

    called, branched = run(build, X, replicas=R)
    pairs = X.reshape(4, 2, -1).mean(1, keepdims=True).repeat(2, 1).reshape(X.shape)
    np.testing.assert_allclose(called, pairs + 4, rtol=1e-5)
    np.testing.assert_array_equal(branched, np.broadcast_to(X.max(0), X.shape))


@pytest.mark.optimised
def test_a_group_of_one_needs_no_communication():
    ir = popxl.Ir(4)
    with ir.main_graph:
        v = popxl.variable(X[0])
        alone = ir.replica_grouping(1, 1)
        y = replicated_all_gather(replicated_reduce_scatter(v, "add", alone), group=alone)
        ops.add_(v, replicated_all_reduce(y.reshape(SHAPE), group=alone))
    text = optimised(popxl.Session(ir))
    assert not [k for k in ("all-reduce", "all-gather", "reduce-scatter") if k in text]


def test_shard_sizes_round_up():
    for n in (0, 1, 7, 8, 9, 64):
        assert shard_elements((n,), 8) == math.ceil(n / 8)


# ---- among the virtual devices of one replica ---------------------------------------------------
@pytest.mark.parametrize(
    ("op", "reduces", "gradient_reduces"),
    [
        (ops.collectives.all_reduce, True, True),
        (ops.collectives.all_reduce_identical_inputs, False, True),
        (ops.collectives.all_reduce_identical_grad_inputs, True, False),
    ],
)
def test_all_reduce_among_virtual_devices(op, reduces, gradient_reduces):
    a, b, da, db = (f32(3, seed=i) for i in range(4))

    def forward(a, b):
        with popxl.ipu(0):
            a = a * 1.0
        with popxl.ipu(1):
            b = b * 1.0
        outs = op([a, b])
        assert [t.ipu for t in (a, b, *outs)] == [0, 1, 0, 1]
        return outs

    def build(a, b, da, db):
        graph = popxl.gir().create_graph(forward, a, b)
        info = autodiff(graph)
        call = ops.call_with_info(graph, a, b)
        grads = ops.call(info.graph, da, db, inputs_dict=info.inputs_dict(call))
        return [*call.outputs, *grads]

    found = run(build, a, b, da, db)
    expected = [*([a + b] * 2 if reduces else [a, b])]
    expected += [da + db] * 2 if gradient_reduces else [da, db]
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)
