"""Remote buffers, and variables stored in them: whole, grouped and sharded."""

from __future__ import annotations

import numpy as np
import pytest

import popxl
from popxl import ops
from tests.popxl.programs import f32, store

R = 8


@pytest.fixture
def ir():
    """A program of 8 replicas whose main graph is active."""
    ir = popxl.Ir(R)
    with ir.main_graph:
        yield ir


def _run(ir, *results):
    with popxl.Session(ir) as session:
        found = session.run()
        return [found[s] for s in results]


# ---- buffers ------------------------------------------------------------------------------------
def test_entries_start_as_zeros_and_keep_what_is_stored_between_runs():
    ir = popxl.Ir()
    with ir.main_graph:
        buffer = popxl.remote_buffer((2,), popxl.float16, 3)
        first = store(ops.remote_load(buffer, 0))
        ops.remote_store(buffer, 0, ops.remote_load(buffer, 0) + 1.0)
        at = popxl.variable([2], popxl.int32)
        ops.remote_store(buffer, at, ops.remote_load(buffer, 0) * 2.0)
        last = store(ops.remote_load(buffer, at))
        untouched = store(ops.remote_load(buffer, 1))
    with popxl.Session(ir) as session:
        for n in range(3):
            found = session.run()
            assert found[first].tolist() == [n, n]
            assert found[last].tolist() == [2 * n + 2] * 2
            assert found[untouched].tolist() == [0, 0]


def test_each_replica_has_its_own_entries(ir):
    buffer = popxl.remote_buffer((), popxl.float32, 2)
    mine = popxl.variable(f32(R), replica_grouping=ir.replica_grouping(1, 1))
    ops.remote_store(buffer, 1, mine)
    (found,) = _run(ir, store(ops.remote_load(buffer, 1)))
    np.testing.assert_array_equal(found, f32(R))


@pytest.mark.parametrize("dtype", [popxl.float16, popxl.bfloat16, popxl.int8, popxl.bool])
def test_entries_of_any_dtype(dtype):
    ir = popxl.Ir()
    with ir.main_graph:
        buffer = popxl.remote_buffer((3,), dtype, 2)
        v = popxl.remote_variable(np.array([1, 0, 1]), buffer, 1, dtype)
        x = ops.remote_load(buffer, 1, name="loaded")
        assert (x.name, x.dtype) == ("loaded", dtype)
        ops.remote_store(buffer, 0, x)
        out = store(ops.remote_load(buffer, 0))
    with popxl.Session(ir) as session:
        np.testing.assert_array_equal(session.run()[out], v._data)
    np.testing.assert_array_equal(session.get_tensor_data(v), v._data)


def test_a_load_in_place_overwrites_the_tensor():
    ir = popxl.Ir()
    with ir.main_graph:
        buffer = popxl.remote_buffer((3,), popxl.float32)
        popxl.remote_variable(f32(3), buffer)
        target = popxl.variable(np.zeros(3, np.float32))
        ops.remote_load_(buffer, 0, target)
    with popxl.Session(ir) as session:
        session.run()
    np.testing.assert_array_equal(session.get_tensor_data(target), f32(3))


def test_wrong_uses_are_errors(ir):
    buffer = popxl.remote_buffer((2,), popxl.float32, 3)
    x = popxl.variable(np.ones(2, np.float32), name="x")
    with pytest.raises(ValueError, match="offset 3 is outside the remote buffer's 3 entries"):
        ops.remote_load(buffer, 3)
    with pytest.raises(ValueError, match="offset -1"):
        ops.remote_store(buffer, -1, x)
    with pytest.raises(ValueError, match=r"has shape \(3,\), but the remote buffer's entries"):
        ops.remote_store(buffer, 0, popxl.variable(np.ones(3, np.float32)))
    with pytest.raises(ValueError, match="has dtype popxl.dtypes.float16"):
        ops.remote_store(buffer, 0, popxl.variable(np.ones(2, np.float16)))
    with pytest.raises(ValueError, match="must be one integer"):
        ops.remote_load(buffer, x)
    with pytest.raises(ValueError, match="at least 1 entry, got 0"):
        popxl.remote_buffer((2,), popxl.float32, 0)
    other = popxl.Ir()
    with other.main_graph, pytest.raises(ValueError, match="belongs to another Ir"):
        ops.remote_load(buffer, 0)


def test_facts_of_a_buffer(ir):
    buffers = [popxl.remote_buffer((2, 3), popxl.float16, n) for n in (1, 4)]
    assert [b.remote_buffer_id for b in buffers] == [1, 2]
    buffer = buffers[1]
    assert (buffer.tensor_shape, buffer.tensor_dtype, buffer.entries) == (
        (2, 3), popxl.float16, 4,
    )  # fmt: skip
    assert repr(buffer) == "RemoteBuffer[2 popxl.dtypes.float16 (2, 3) entries=4]"
    buffer.entries = 5
    assert buffer.entries == 5


# ---- remote variables ---------------------------------------------------------------------------
@pytest.mark.parametrize("mode", ["one_per_group", "all_replicas"])
@pytest.mark.parametrize("assignment", [[0] * 8, [0, 0, 1, 1, 0, 0, 1, 1], list(range(8))])
def test_groups_have_values_of_their_own(ir, assignment, mode):
    grouping = ir.replica_grouping_from_assignments(assignment)
    groups = grouping.num_groups
    data = f32(*((groups,) if groups > 1 else ()), 3)
    buffer = popxl.remote_buffer((3,), popxl.float32, 2)
    v = popxl.remote_variable(
        data, buffer, 1, replica_grouping=grouping, retrieval_mode=mode, name="v"
    )
    rank = popxl.variable(
        np.arange(8, dtype=np.float32), replica_grouping=ir.replica_grouping(1, 1)
    )
    x = ops.remote_load(buffer, 1)
    ops.remote_store(buffer, 1, x * 2.0 + rank)
    out = store(x)
    initial = data[assignment] if groups > 1 else np.tile(data, (8, 1))
    after = initial * 2 + np.arange(8, dtype=np.float32)[:, None]
    with popxl.Session(ir) as session:
        assert session.get_tensor_data(v).shape == v._shape_retrieved
        np.testing.assert_array_equal(session.run()[out], initial)
        found = session.get_tensor_data(v)
    if mode == "all_replicas":
        np.testing.assert_allclose(found, after, rtol=1e-6)
    else:
        firsts = [assignment.index(g) for g in range(groups)]
        np.testing.assert_allclose(found, after[firsts] if groups > 1 else after[0], rtol=1e-6)


def test_a_remote_variable_must_fit_its_buffer(ir):
    buffer = popxl.remote_buffer((2,), popxl.float32, 2)
    with pytest.raises(ValueError, match=r"float32\[3\] does not match .* float32\[2\]"):
        popxl.remote_variable(np.ones(3, np.float32), buffer)
    with pytest.raises(ValueError, match="float16"):
        popxl.remote_variable(np.ones(2, np.float16), buffer)
    with pytest.raises(ValueError, match="offset 2 is outside"):
        popxl.remote_variable(np.ones(2, np.float32), buffer, 2)
    with pytest.raises(ValueError, match="first axis must be the 2 groups"):
        popxl.remote_variable(
            np.ones((3, 2), np.float32), buffer, replica_grouping=ir.replica_grouping(group_size=4)
        )


# ---- sharded variables --------------------------------------------------------------------------
SHARDED = [
    # assignment, shards of a group, shape of the whole
    ([0] * 8, None, (5, 3)),
    ([0] * 8, 4, (5, 3)),
    ([0] * 8, 1, (5, 3)),
    ([0] * 8, 8, (3,)),
    ([0, 0, 0, 0, 1, 1, 1, 1], None, (5, 3)),
    ([0, 1, 0, 1, 0, 1, 0, 1], 2, (4, 4)),
    ([0, 1, 1, 0, 1, 0, 0, 1], None, (7,)),
    (list(range(8)), None, (5,)),
]


def _shards_of(data: np.ndarray, assignment: list[int], shards: int, groups: int) -> np.ndarray:
    """What each replica stores."""
    rows = []
    for r, group in enumerate(assignment):
        whole = (data[group] if groups > 1 else data).ravel()
        size = -(-whole.size // shards)
        place = assignment[:r].count(group) % shards
        rows.append(np.pad(whole, (0, size * shards - whole.size)).reshape(shards, size)[place])
    return np.stack(rows)


@pytest.mark.parametrize("mode", ["one_per_group", "all_replicas"])
@pytest.mark.parametrize(("assignment", "shard_over", "shape"), SHARDED)
def test_shards_are_cut_loaded_gathered_and_read_back(ir, assignment, shard_over, shape, mode):
    grouping = ir.replica_grouping_from_assignments(assignment)
    groups, shards = grouping.num_groups, shard_over or grouping.group_size
    data = f32(*((groups,) if groups > 1 else ()), *shape)
    v, shard = popxl.replica_sharded_variable(
        data, replica_grouping=grouping, shard_over=shard_over, retrieval_mode=mode, name="v"
    )
    assert (shard.meta_shape, v.meta_shape) == (shape, shape)
    assert v.shape_on_replica == shape
    results = [store(shard)]
    if shards == grouping.group_size:
        whole = ops.collectives.replicated_all_gather(shard, group=grouping)
        assert whole.shape == shape
        results.append(store(whole))
    ops.remote_store(v._remote[0], 0, shard * 2.0)
    with popxl.Session(ir) as session:
        found = session.run()
        value = session.get_tensor_data(v)
    np.testing.assert_array_equal(found[results[0]], _shards_of(data, assignment, shards, groups))
    replicated = data[assignment] if groups > 1 else np.tile(data, (8, *[1] * len(shape)))
    if len(results) > 1:
        np.testing.assert_array_equal(found[results[1]], replicated)
    np.testing.assert_allclose(
        value, 2 * (replicated if mode == "all_replicas" else data), rtol=1e-6
    )


def test_a_sharded_variable_can_be_written_and_used_again(ir):
    v, shard = popxl.replica_sharded_variable(np.zeros((5, 3), np.float32))
    out = store(ops.collectives.replicated_all_gather(shard))
    with popxl.Session(ir) as session:
        for seed in range(2):
            session.write_variable_data(v, f32(5, 3, seed=seed))
            np.testing.assert_array_equal(session.run()[out][0], f32(5, 3, seed=seed))
            np.testing.assert_array_equal(session.get_tensor_data(v), f32(5, 3, seed=seed))


def test_wrong_shards_are_errors(ir):
    with pytest.raises(ValueError, match="shard_over=3 must divide the group size 8"):
        popxl.replica_sharded_buffer((5,), popxl.float32, shard_over=3)
    buffer = popxl.replica_sharded_buffer((5, 3), popxl.float32)
    assert (buffer.tensor_shape, buffer.meta_shape) == ((2,), (5, 3))
    with pytest.raises(ValueError, match=r"holds shards of \(5, 3\)"):
        popxl.remote_replica_sharded_variable(np.ones((3, 5), np.float32), buffer)
    small = popxl.remote_buffer((1,), popxl.float32)
    with pytest.raises(ValueError, match="cannot hold one of up to 8 shards"):
        popxl.remote_replica_sharded_variable(np.ones((3, 5), np.float32), small)
