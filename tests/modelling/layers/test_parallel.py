"""Replica groups, and what differs between the members of a group."""

from __future__ import annotations

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from modelling.layers import ParallelGroups
from modelling.layers.dropout import Dropout
from popxl import ops


def test_members_of_a_group_are_neighbours():
    ir = popxl.Ir(replication=8)
    with ir.main_graph:
        groups = ParallelGroups.from_current_ir(4)
    assert (groups.tensor_parallel, groups.data_parallel) == (4, 2)
    assert groups.tp.groups == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert groups.dp.groups == groups.sharded.groups == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert groups.replicated.num_groups == 1
    assert groups.sharded.transpose() == groups.tp


def test_one_member_holds_and_does_everything():
    ir = popxl.Ir(replication=2)
    with ir.main_graph:
        groups = ParallelGroups.from_current_ir(1)
        x = popxl.constant(1.0, popxl.float32)
        assert groups.copy_to_tp(x) is groups.reduce_from_tp(x) is x
    assert groups.sharded == groups.replicated
    assert groups.tp.group_size == 1


def test_sizes_must_fit():
    ir = popxl.Ir(replication=6)
    said = "6 replicas, which is no multiple of .* 4"
    with ir.main_graph, pytest.raises(ValueError, match=said):
        ParallelGroups.from_current_ir(4)


def test_random_numbers_inside_a_sharded_computation_are_each_members_own():
    """Outside they are the same; members of the same rank in other groups differ by their seed."""
    ir = popxl.Ir(replication=4)
    with ir.main_graph:
        groups, dropout = ParallelGroups.from_current_ir(2), Dropout(0.5)
        seeds = np.array([[1, 2], [3, 4]], np.uint32)
        seed = popxl.variable(seeds, replica_grouping=groups.tp)
        x = popxl.constant(np.ones(64), popxl.float32)
        outside, inside = ops.split_random_seed(seed, 2)
        streams = [addons.host_store(dropout(x, s)) for s in (outside, groups.tp_seed(inside))]
    with popxl.Session(ir, "cpu") as session:
        out = session.run()
    same, own = (out[s] for s in streams)
    np.testing.assert_array_equal(same[0], same[1])
    assert not np.array_equal(same[0], same[2])
    assert len({row.tobytes() for row in own}) == 4


def test_dropout_without_a_seed_says_so():
    with popxl.Ir().main_graph:
        x = popxl.constant(np.ones(3), popxl.float32)
        with pytest.raises(ValueError, match=r"dropout with probability 0.1 needs a seed"):
            Dropout(0.1)(x, None)
        assert Dropout()(x, None) is x
