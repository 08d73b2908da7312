"""Groupings of replicas against a description of them in numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import popxl
from popxl import ops

VALID = [
    (replicas, stride, size)
    for replicas in (1, 2, 4, 6, 8, 12)
    for stride in (1, 2, 3, 4, 6)
    for size in (1, 2, 3, 4, 6, 8)
    if size == 1 or replicas % (stride * size) == 0
    if replicas % size == 0
]


def _by_stride(replicas: int, stride: int, size: int) -> list[set[int]]:
    """Groups of every `stride`-th replica, in order of their first."""
    free, groups = set(range(replicas)), []
    while free:
        first = min(free)
        group = {first + i * stride for i in range(size)}
        assert group <= free
        free -= group
        groups.append(group)
    return groups


@pytest.mark.parametrize(("replicas", "stride", "size"), VALID)
def test_groups_take_every_stride_th_replica(replicas, stride, size):
    grouping = popxl.Ir(replicas).replica_grouping(stride, size)
    expected = _by_stride(replicas, stride, size)
    assert [set(g) for g in grouping.groups] == expected
    assert (grouping.num_groups, grouping.group_size) == (len(expected), size)
    assert grouping.assignment == [
        next(i for i, g in enumerate(expected) if r in g) for r in range(replicas)
    ]
    assert grouping.is_const
    if size > 1:
        assert grouping.stride == stride
    assert (grouping.to_device_map, grouping.to_host_map) == (None, None)
    assert grouping.const_rg is grouping


@pytest.mark.parametrize(
    ("replicas", "stride", "size"),
    [(4, 0, 1), (4, 1, 0), (4, 1, 3), (4, 3, 2), (8, 4, 4), (6, 2, 2), (4, -1, 2), (4, 8, 2)],
)
def test_what_does_not_divide_is_an_error(replicas, stride, size):
    with pytest.raises(ValueError, match=f"{replicas} replicas|must be at least 1"):
        popxl.Ir(replicas).replica_grouping(stride, size)


def test_the_default_is_one_group_of_all_and_a_stride_alone_takes_as_many_as_fit():
    ir = popxl.Ir(8)
    assert ir.replica_grouping().groups == (tuple(range(8)),)
    assert ir.replica_grouping(stride=2).groups == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert ir.replica_grouping(group_size=2).groups == ((0, 1), (2, 3), (4, 5), (6, 7))


@pytest.mark.parametrize(("replicas", "stride", "size"), VALID)
def test_the_transpose_joins_the_members_of_one_rank(replicas, stride, size):
    grouping = popxl.Ir(replicas).replica_grouping(stride, size)
    transposed = grouping.transpose()
    table = np.array(grouping.groups)
    assert {frozenset(g) for g in transposed.groups} == {frozenset(c) for c in table.T.tolist()}
    assert {frozenset(g) for g in transposed.transpose().groups} == {
        frozenset(g) for g in grouping.groups
    }


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_partition_into_equal_groups_is_a_grouping(data):
    size, groups = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    order = _in_order(data.draw(st.permutations(sorted(list(range(groups)) * size))))
    ir = popxl.Ir(size * groups)
    grouping = ir.replica_grouping_from_assignments(order)
    assert grouping.assignment == order
    for group, members in enumerate(grouping.groups):
        assert list(members) == [r for r, g in enumerate(order) if g == group]
    if grouping.is_const:
        again = ir.replica_grouping(grouping.stride, size)
        assert {frozenset(g) for g in again.groups} == {frozenset(g) for g in grouping.groups}
    assert grouping.transpose().group_size == groups


def test_a_partition_without_stride():
    grouping = popxl.Ir(8).replica_grouping_from_assignments([0, 1, 1, 0, 1, 0, 0, 1])
    assert not grouping.is_const
    with pytest.raises(NotImplementedError, match="no constant stride"):
        _ = grouping.stride
    assert grouping.to_device_map == [0, 1, 1, 0, 1, 0, 0, 1]
    assert grouping.to_host_map == [0, 1]
    assert grouping.const_rg.num_groups == 8
    assert repr(grouping) == "ReplicaGrouping(assignment=[0, 1, 1, 0, 1, 0, 0, 1])"


def _in_order(labels):
    """Returns the same partition, with groups numbered in the order of their first replica."""
    return [list(dict.fromkeys(labels)).index(label) for label in labels]


CONST = [
    # assignment, that of const_rg, const group -> group, group -> its first const group
    ([0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3], [0, 1, 0, 1],
     [0, 1]),
    ([0, 0, 1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 2, 2, 3, 3], [0, 1, 1, 0], [0, 1]),
    ([0, 1, 0, 1, 1, 0, 1, 0], list(range(8)), [0, 1, 0, 1, 1, 0, 1, 0], [0, 1]),
    ([0, 1, 0, 1, 2, 3, 2, 3, 2, 3, 2, 3, 0, 1, 0, 1],
     [0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 4, 5, 6, 7, 6, 7], [0, 1, 2, 3, 2, 3, 0, 1], [0, 1, 2, 3]),
    # Runs of 4 and 2: their greatest common divisor is 2.
    ([0, 0, 0, 0, 1, 1, 2, 2, 1, 1, 2, 2], [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5],
     [0, 0, 1, 2, 1, 2], [0, 2, 3]),
]  # fmt: skip


@pytest.mark.parametrize(("assignment", "const", "to_device", "to_host"), CONST)
def test_the_coarsest_const_grouping_inside_a_partition(assignment, const, to_device, to_host):
    grouping = popxl.Ir(len(assignment)).replica_grouping_from_assignments(assignment)
    assert grouping.const_rg.is_const
    assert grouping.const_rg.assignment == const
    assert (grouping.to_device_map, grouping.to_host_map) == (to_device, to_host)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_the_const_grouping_lies_inside_and_the_maps_lead_there_and_back(data):
    size, groups = data.draw(st.integers(2, 4)), data.draw(st.integers(2, 4))
    order = _in_order(data.draw(st.permutations(sorted(list(range(groups)) * size))))
    grouping = popxl.Ir(size * groups).replica_grouping_from_assignments(order)
    const = grouping.const_rg
    assert const.is_const
    assert all(len({order[r] for r in members}) == 1 for members in const.groups)
    if not grouping.is_const:
        on_host = np.arange(groups)
        on_device = on_host[grouping.to_device_map]
        assert [on_device[const.assignment[r]] for r in range(len(order))] == order
        np.testing.assert_array_equal(on_device[grouping.to_host_map], on_host)


def test_equality_does_not_depend_on_the_number_of_replicas():
    """Groupings are keys of caches, and the number of replicas may be set late."""
    ir = popxl.Ir(2)
    everyone, pair, alone = (
        ir.replica_grouping(),
        ir.replica_grouping(1, 2),
        ir.replica_grouping(1, 1),
    )
    found = {everyone: "all", alone: "alone"}
    assert (everyone == pair, everyone == alone) == (True, False)
    ir.replication_factor = 4
    assert (found[everyone], found[ir.replica_grouping()], found[alone]) == ("all", "all", "alone")
    assert everyone != ir.replica_grouping(1, 2)
    assert everyone != popxl.Ir(4).replica_grouping()


@pytest.mark.parametrize(
    "wrong",
    [[0, 0, 1], [0, 0, 0, 1], [0, 2, 0, 2], [1, 1, 2, 2], [-1, -1, 0, 0], [], [1, 0, 1, 0]],
)
def test_wrong_assignments_are_errors(wrong):
    with pytest.raises(ValueError, match=r"assignment"):
        popxl.Ir(4).replica_grouping_from_assignments(wrong)


def test_equal_partitions_are_equal_however_made():
    ir = popxl.Ir(4)
    a, b = ir.replica_grouping(2, 2), ir.replica_grouping_from_assignments([0, 1, 0, 1])
    assert a == b
    assert len({a, b, ir.replica_grouping(1, 2)}) == 2
    assert repr(a) == ("ReplicaGrouping(num_replicas=4, stride=2, group_size=2, num_groups=2)")
    odd = ir.replica_grouping_from_assignments([0, 1, 1, 0])
    assert repr(odd) == "ReplicaGrouping(assignment=[0, 1, 1, 0])"


def test_replicas_are_counted_by_the_session_options():
    """Programs can set the options that PopART's launcher sets."""
    ir = popxl.Ir(replication=2)
    options = ir._pb_ir.getSessionOptions()
    assert (options.enableReplicatedGraphs, options.replicatedGraphCount) == (True, 2)
    options.enableDistributedReplicatedGraphs = True
    options.globalReplicationFactor = 8
    assert (ir.replication_factor, ir.instance_replication_factor) == (8, 2)
    with ir.main_graph:
        assert ir.replica_grouping().group_size == 8
        assert popxl.replica_sharded_buffer((16,), popxl.float32, shard_over=4).tensor_shape == (4,)
    options.replicatedGraphCount = 4
    assert ir.instance_replication_factor == 4
    options.enableDistributedReplicatedGraphs = False
    assert ir.replication_factor == 4


def test_groupings_cannot_be_made_directly():
    with pytest.raises(RuntimeError, match="use ir.replica_grouping"):
        popxl.ReplicaGrouping()


def test_the_number_of_replicas_may_be_set_after_the_program_is_written():
    ir = popxl.Ir()
    with ir.main_graph:
        v = popxl.variable(np.float32(1.0), name="v")
        source = popxl.h2d_stream((), popxl.float32)
        x = ops.host_load(source)
        ops.add_(v, ops.collectives.replicated_all_reduce(x))
        mean = ops.collectives.replicated_all_reduce(x, "mean", ir.replica_grouping())
        target = popxl.d2h_stream((), popxl.float32)
        ops.host_store(target, mean)
    ir.replication_factor = 4
    ir.num_host_transfers = 1
    with popxl.Session(ir) as session:
        found = session.run({source: np.array([1, 2, 3, 6], np.float32)})[target]
        assert found.tolist() == [3.0] * 4
        assert session.get_tensor_data(v) == 13.0


def test_a_grouping_that_no_longer_fits_the_replicas_is_an_error():
    ir = popxl.Ir(4)
    with ir.main_graph:
        v = popxl.variable(np.ones((2, 3), np.float32), replica_grouping=ir.replica_grouping(1, 2))
        ops.add_(v, popxl.constant(1.0))
    ir.replication_factor = 8
    with pytest.raises(ValueError, match=r"4 replicas.*8"):
        popxl.Session(ir)


def test_a_shape_made_for_another_number_of_replicas_is_an_error():
    ir = popxl.Ir(2)
    with ir.main_graph:
        ops.collectives.replicated_all_gather(popxl.variable(np.ones(3, np.float32)))
    ir.replication_factor = 4
    with pytest.raises(ValueError, match=r"replicated_all_gather at .* another number of replicas"):
        popxl.Session(ir)
