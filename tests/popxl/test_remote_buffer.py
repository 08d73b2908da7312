"""Remote buffers, and variables stored in them: whole, grouped and sharded."""

from __future__ import annotations

import math

import numpy as np
import pytest

import popxl
from popxl import ops
from tests.popxl.programs import f32, store

pytestmark = pytest.mark.usefixtures("cached", "compiled_quickly")
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
        assert (x.name, x.dtype) == ("loaded_remote_loaded", dtype)
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
    with pytest.raises(ValueError, match="offset must be at least 0, not -1"):
        ops.remote_store(buffer, -1, x)
    with pytest.raises(ValueError, match=r"has shape \(3,\), but the remote buffer's entries"):
        ops.remote_store(buffer, 0, popxl.variable(np.ones(3, np.float32)))
    with pytest.raises(ValueError, match="has dtype popxl.dtypes.float16"):
        ops.remote_store(buffer, 0, popxl.variable(np.ones(2, np.float16)))
    with pytest.raises(ValueError, match="must be one integer"):
        ops.remote_load(buffer, x)
    with pytest.raises(ValueError, match="entries must be at least 1, not 0"):
        popxl.remote_buffer((2,), popxl.float32, 0)


def test_a_buffer_belongs_to_one_ir():
    with popxl.Ir().main_graph:
        buffer = popxl.remote_buffer((2,), popxl.float32, 3)
    with popxl.Ir().main_graph, pytest.raises(ValueError, match="belongs to another Ir"):
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
    with pytest.raises(ValueError, match="float16"):
        popxl.remote_variable(np.ones(2, np.float16), buffer)
    with pytest.raises(ValueError, match="offset 2 is outside"):
        popxl.remote_variable(np.ones(2, np.float32), buffer, 2)
    with pytest.raises(ValueError, match="first axis must be the 2 groups"):
        popxl.remote_variable(
            np.ones((3, 2), np.float32), buffer, replica_grouping=ir.replica_grouping(group_size=4)
        )


@pytest.mark.parametrize("groups", [1, 2])
def test_an_entry_takes_the_elements_whatever_their_shape(ir, groups):
    """The shapes of data and entry are not compared: loading gives the entry's."""
    grouping = ir.replica_grouping(group_size=8 // groups)
    data = f32(*([groups] if groups > 1 else []), 1, 2, 3)
    buffer = popxl.remote_buffer([2, 3], popxl.float32)
    v = popxl.remote_variable(data, buffer, replica_grouping=grouping)
    assert (v.shape, v.shape_on_host) == ((1, 2, 3), data.shape)
    loaded = ops.remote_load(buffer, 0)
    assert loaded.shape == (2, 3)
    ops.remote_store(buffer, 0, loaded * 2.0)
    with popxl.Session(ir) as session:
        session.run()
        np.testing.assert_array_equal(session.get_tensor_data(v), 2 * data)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_wrong_number_of_elements_is_found_when_a_session_is_made(ir, sharded):
    buffer = popxl.remote_buffer((5,), popxl.float32)
    create = popxl.remote_replica_sharded_variable if sharded else popxl.remote_variable
    v = create(f32(16), buffer, name="v")
    assert v.shape == (16,)
    with pytest.raises(ValueError, match=r"shards|'v' needs 16 elements"):
        popxl.Session(ir)


def test_an_entry_holds_one_variable(ir):
    buffer = popxl.remote_buffer((2,), popxl.float32, 2)
    popxl.remote_variable(f32(2), buffer, 1, name="first")
    with pytest.raises(ValueError, match="entry 1 of .* holds variable 'first'"):
        popxl.remote_variable(f32(2), buffer, 1)
    popxl.remote_variable(f32(2), buffer, 0)


# ---- sharded variables --------------------------------------------------------------------------
SHARDED = [
    # assignment, shards of a group, shape of the whole
    ([0] * 8, None, (5, 3)),
    ([0] * 8, 4, (5, 3)),
    ([0] * 8, 1, (5, 3)),
    ([0] * 8, 8, (3,)),
    ([0, 0, 0, 0, 1, 1, 1, 1], None, (5, 3)),
    ([0, 1, 0, 1, 0, 1, 0, 1], 2, (4, 4)),
    ([0, 0, 1, 1, 1, 1, 0, 0], None, (7,)),  # sharded over groups of 2
    ([0, 1, 1, 0, 1, 0, 0, 1], None, (7,)),  # over groups of 1
    (list(range(8)), None, (5,)),
    # Lengths do not tell the number of shards.
    ([0] * 8, 4, (2,)),
    ([0] * 8, 2, (1,)),
    ([0, 1, 0, 1, 0, 1, 0, 1], 2, (1,)),
]


def _shards_of(data: np.ndarray, assignment: list[int], shards: int, groups: int) -> np.ndarray:
    """Returns the part that each replica stores."""
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
    groups, shards = grouping.num_groups, shard_over or grouping.const_rg.group_size
    data = f32(*((groups,) if groups > 1 else ()), *shape)
    v, shard = popxl.replica_sharded_variable(
        data, replica_grouping=grouping, shard_over=shard_over, retrieval_mode=mode, name="v"
    )
    assert (shard.shape, shard.meta_shape) == ((-(-math.prod(shape) // shards),), shape)
    assert (v.shape, v.meta_shape, v.shape_on_host) == (shape, (), data.shape)
    whole = ops.collectives.replicated_all_gather(shard, group=grouping.const_rg)
    assert whole.shape == shape
    results = [store(shard * 1.0), store(whole)]
    ops.var_updates.copy_var_update_(shard, shard * 2.0)
    with popxl.Session(ir) as session:
        found = session.run()
        value = session.get_tensor_data(v)
    np.testing.assert_array_equal(found[results[0]], _shards_of(data, assignment, shards, groups))
    replicated = data[assignment] if groups > 1 else np.tile(data, (8, *[1] * len(shape)))
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
    with pytest.raises(ValueError, match="shard_over=16 must divide"):
        popxl.replica_sharded_variable(f32(5), shard_over=16)
    buffer = popxl.replica_sharded_buffer((5, 3), popxl.float32)
    assert (buffer.tensor_shape, buffer.meta_shape) == ((2,), (5, 3))
    with pytest.raises(ValueError, match=r"holds shards of \(5, 3\)"):
        popxl.remote_replica_sharded_variable(np.ones((3, 5), np.float32), buffer)


def test_the_shape_of_a_sharded_buffer_is_that_of_the_host():
    ir = popxl.Ir(6)
    with ir.main_graph:
        threes = ir.replica_grouping(1, 3)
        buffer = popxl.replica_sharded_buffer([2, 5, 3], popxl.int32, threes)
        assert (buffer.tensor_shape, buffer.meta_shape) == ((5,), (5, 3))
        with pytest.raises(ValueError, match="shard_over=6 must divide the group size 3"):
            popxl.replica_sharded_buffer((2, 5, 3), popxl.int32, threes, 6)
        with pytest.raises(ValueError, match="must begin with the 2 groups"):
            popxl.replica_sharded_buffer((), popxl.int32, threes)
        # Without a stride the groups of const_rg count: here single replicas, three groups of two.
        mixed = ir.replica_grouping_from_assignments([0, 0, 1, 1, 1, 0])
        single = popxl.replica_sharded_buffer((2, 5, 3), popxl.int32, mixed)
        assert (single.tensor_shape, single.meta_shape) == ((15,), (5, 3))
        with pytest.raises(ValueError, match="shard_over=3 must divide the group size 1"):
            popxl.replica_sharded_buffer((2, 5, 3), popxl.int32, mixed, 3)


def test_a_plain_buffer_becomes_one_of_shards_with_its_first_sharded_variable(ir):
    buffer = popxl.RemoteBuffer([2], popxl.float32, 2)
    assert buffer.meta_shape == ()
    v = popxl.remote_replica_sharded_variable(f32(5, 3), buffer, 0)
    assert (buffer.meta_shape, v.shape, v.shape_on_host) == ((5, 3), (5, 3), (5, 3))
    shard = ops.remote_load(buffer, 0)
    assert (shard.shape, shard.meta_shape) == ((2,), (5, 3))
    with pytest.raises(ValueError, match=r"holds shards of \(5, 3\)"):
        popxl.remote_replica_sharded_variable(f32(3, 5), buffer, 1)
    w = popxl.remote_replica_sharded_variable(f32(5, 3, seed=1), buffer, 1)
    out = store(ops.collectives.replicated_all_gather(ops.remote_load(buffer, 1)))
    with popxl.Session(ir) as session:
        np.testing.assert_array_equal(session.run()[out][3], f32(5, 3, seed=1))
        np.testing.assert_array_equal(session.get_tensor_data(w), f32(5, 3, seed=1))


def test_a_buffer_of_whole_entries_takes_a_sharded_variable(ir):
    buffer = popxl.remote_buffer((6,), popxl.float32)
    v = popxl.remote_replica_sharded_variable(f32(2, 3), buffer)
    loaded = ops.remote_load(buffer, 0)
    assert (loaded.shape, loaded.meta_shape, v.shape) == ((6,), (2, 3), (2, 3))
    out = store(loaded)
    ops.remote_store(buffer, 0, loaded * 2.0)
    with popxl.Session(ir) as session:
        np.testing.assert_array_equal(session.run()[out], np.tile(f32(2, 3).ravel(), (R, 1)))
        np.testing.assert_array_equal(session.get_tensor_data(v), 2 * f32(2, 3))


def test_four_elements_in_three_shards_of_six_replicas():
    """Two shards would have as many elements each."""
    ir = popxl.Ir(6)
    data = np.array([1, 2, 3, 4], np.float32)
    with ir.main_graph:
        buffer = popxl.replica_sharded_buffer((4,), popxl.float32, shard_over=3)
        v = popxl.remote_replica_sharded_variable(data, buffer)
        shard = ops.remote_load(buffer, 0)
        graph = ir.create_graph(lambda t: ops.collectives.replicated_all_gather(t * 2.0), shard)
        outs = [store(shard), store(*ops.call(graph, shard))]
    with popxl.Session(ir) as session:
        found = session.run()
        np.testing.assert_array_equal(session.get_tensor_data(v), data)
    np.testing.assert_array_equal(found[outs[0]], [[1, 2], [3, 4], [0, 0]] * 2)
    np.testing.assert_array_equal(found[outs[1]], np.tile(2 * data, (6, 1)))


def test_a_buffer_that_fits_several_numbers_of_shards_is_refused():
    ir = popxl.Ir(6)
    with ir.main_graph:
        buffer = popxl.remote_buffer((2,), popxl.float32)
        popxl.remote_replica_sharded_variable(f32(4), buffer)
    with pytest.raises(ValueError, match=r"\[2, 3\] shards all have 2 elements"):
        popxl.Session(ir)


# ---- shards as state ----------------------------------------------------------------------------
@pytest.mark.parametrize("how", ["+=", "copy", "called", "looped"])
def test_what_a_program_changes_of_a_shard_stays(how):
    ir = popxl.Ir(4)
    data = f32(2, 5, 3)  # two groups of two replicas
    with ir.main_graph:
        v, shard = popxl.replica_sharded_variable(
            data, replica_grouping=ir.replica_grouping(group_size=2), name="v"
        )

        def change(t: popxl.TensorByRef):
            ops.add_(t, popxl.constant(1, popxl.float32))

        if how == "+=":
            shard += 1
        elif how == "copy":
            ops.var_updates.copy_var_update_(shard, shard + 1.0)
        else:
            graph = ir.create_graph(change, shard)
            if how == "called":
                ops.call(graph, shard)
            else:
                ops.repeat(graph, 1, shard)
    with popxl.Session(ir) as session:
        for n in range(1, 4):
            session.run()
            if n == 2:
                np.testing.assert_allclose(session.get_tensor_data(v), data + 2, rtol=1e-6)
        session.weights_to_host()
        session.weights_from_host()
        session.run()
    np.testing.assert_allclose(session.get_tensor_data(v), data + 4, rtol=1e-6)
    with session:
        session.write_variable_data(v, data)
        session.run()
    np.testing.assert_allclose(session.get_tensor_data(v), data + 1, rtol=1e-6)
    assert v in ir.main_graph.variables
    assert "shard of %v" in str(ir.main_graph)


# ---- groupings without a stride -----------------------------------------------------------------
@pytest.mark.parametrize("kind", ["variable", "remote", "sharded", "remote sharded"])
def test_variables_of_groups_without_stride_have_host_data_of_their_groups(kind):
    ir = popxl.Ir(8)
    grouping = ir.replica_grouping_from_assignments([0, 0, 1, 1, 1, 1, 0, 0])
    data = f32(2, 3, 3)
    with ir.main_graph:
        if kind == "variable":
            v = x = popxl.variable(data, replica_grouping=grouping)
        elif kind == "remote":
            buffer = popxl.remote_buffer((3, 3), popxl.float32)
            v = popxl.remote_variable(data, buffer, replica_grouping=grouping)
            x = ops.remote_load(buffer, 0)
        elif kind == "sharded":
            v, x = popxl.replica_sharded_variable(data, replica_grouping=grouping)
        else:
            shape = (4, 3, 3)  # the groups of const_rg
            buffer = popxl.replica_sharded_buffer(shape, popxl.float32, grouping)
            v = popxl.remote_replica_sharded_variable(data, buffer, replica_grouping=grouping)
            x = ops.remote_load(buffer, 0)
        if "sharded" in kind:
            assert (x.shape, x.meta_shape) == ((5,), (3, 3))
            x = ops.collectives.replicated_all_gather(x, group=grouping.const_rg)
        out = store(x * 1.0)
    assert (v.shape, v.shape_on_host) == ((3, 3), data.shape)
    assert v.replica_grouping is grouping
    with popxl.Session(ir) as session:
        np.testing.assert_array_equal(session.run()[out], data[[0, 0, 1, 1, 1, 1, 0, 0]])
        session.write_variable_data(v, data * 2)
        np.testing.assert_array_equal(session.run()[out], 2 * data[[0, 0, 1, 1, 1, 1, 0, 0]])
        np.testing.assert_array_equal(session.get_tensor_data(v), data * 2)
