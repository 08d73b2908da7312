import numpy as np
import pytest

import popxl
from popxl import ops
from popxl_addons import NamedTensors
from popxl_addons.remote import (
    create_remote_buffer,
    load_remote,
    load_remote_graph,
    named_buffers,
    named_variable_buffers,
    store_remote,
    store_remote_graph,
)
from popxl_addons.variable_factory import NamedVariableFactories, VariableFactory


def factories(**kwargs):
    return NamedVariableFactories(
        w=VariableFactory(lambda: np.arange(8, dtype=np.float32).reshape(2, 4), name="w", **kwargs),
        deep=NamedVariableFactories(b=VariableFactory(1.0, name="b")),
    )


@pytest.mark.parametrize("use_io_tiles", [False, True])
def test_entries_are_loaded_and_stored_by_name(use_io_tiles):
    ir = popxl.Ir()
    with ir.main_graph:
        facts = factories()
        buffers = named_variable_buffers(facts, entries=2)
        rows = [facts.init_remote(buffers, i, f"row{i}") for i in range(2)]
        load, names = load_remote_graph(buffers, 2, use_io_tiles)
        store = store_remote_graph(buffers, 2, use_io_tiles)
        assert names == store.args.keys_flat() == ["deep.b", "w"]
        loaded = NamedTensors.pack(names, load.call(0))
        changed = loaded.map(lambda t: t * 2.0 + 1.0)
        store.bind(changed).call(1)
    with popxl.Session(ir) as session:
        session.run()
    w = np.arange(8).reshape(2, 4)
    np.testing.assert_array_equal(session.get_tensor_data(rows[0].w), w)
    np.testing.assert_array_equal(session.get_tensor_data(rows[1].w), w * 2 + 1)
    assert session.get_tensor_data(rows[1].deep.b) == 3


def test_loads_and_stores_without_graphs():
    ir = popxl.Ir()
    with ir.main_graph:
        facts = factories()
        buffers = named_variable_buffers(facts)
        variables = facts.init_remote(buffers)
        store_remote(buffers, load_remote(buffers).map(lambda t: t - 1.0))
    with popxl.Session(ir) as session:
        session.run()
    assert session.get_tensor_data(variables.w)[0, 0] == -1


def test_buffers_are_sharded_as_asked():
    ir = popxl.Ir(replication=4)
    with ir.main_graph:
        facts = factories()

        def shapes(wanted):
            buffers = named_variable_buffers(facts, shard_over_dict=wanted)
            return [b.tensor_shape for b in buffers.values_flat()]

        assert shapes(True) == [(), (2,)]  # 8 elements over 4 replicas; a scalar stays whole
        assert shapes(False) == shapes(1) == [(), (2, 4)]
        assert shapes(2) == [(), (4,)]
        assert shapes({"w": 2}) == [(), (4,)]
        assert shapes({"deep.b": 4}) == shapes({}) == [(), (2,)]  # w has no number: over all
        assert shapes({"w": False}) == [(), (2, 4)]
        for wrong in (0, 5, -1, "all", None, {"w": 0}):
            with pytest.raises(ValueError, match="from 1 to 4"):
                shapes(wrong)
        for threshold, w in ((8, (2,)), (9, (2, 4))):
            small = named_variable_buffers(facts, sharded_threshold=threshold)
            assert small.w.tensor_shape == w
            by_name = named_variable_buffers(
                facts, shard_over_dict={"w": 4}, sharded_threshold=threshold
            )
            assert by_name.w.tensor_shape == w


def test_variables_that_replicas_cannot_share_evenly_stay_whole():
    ir = popxl.Ir(replication=4)
    with ir.main_graph:
        facts = NamedVariableFactories(b=VariableFactory(lambda: np.zeros((3, 2))))
        for over in (True, 4):
            assert named_variable_buffers(facts, shard_over_dict=over).b.tensor_shape == (3, 2)
        assert named_variable_buffers(facts, shard_over_dict=2).b.tensor_shape == (3,)


def test_factories_of_shards_know_their_number():
    ir = popxl.Ir(replication=4)
    with ir.main_graph:
        facts = factories()
        facts.w = VariableFactory(lambda: np.zeros((2, 4)), shard_over=2)
        buffers = named_variable_buffers(facts, shard_over_dict=False)
        assert (buffers.w.tensor_shape, buffers.w.meta_shape) == ((4,), (2, 4))


def test_a_variable_is_sharded_within_its_group():
    ir = popxl.Ir(replication=4)
    with ir.main_graph:
        pairs = ir.replica_grouping(group_size=2)
        buffers = named_variable_buffers(factories(replica_grouping=pairs))
        assert buffers.w.tensor_shape == (4,)


def test_buffers_of_tensors_and_specs():
    ir = popxl.Ir(replication=4)
    half = popxl.TensorSpec((2, 4), popxl.float16)
    with ir.main_graph:
        shard = ops.init((3,), popxl.float32, meta_shape=(2, 3))
        for buffer in (
            named_buffers(NamedTensors(x=shard), entries=3).x,
            create_remote_buffer(shard.spec, 3, shard_over=7),  # of shards, however many
        ):
            assert (buffer.tensor_shape, buffer.meta_shape, buffer.entries) == ((3,), (2, 3), 3)
        assert named_buffers(NamedTensors(x=popxl.constant(1.0))).x.tensor_shape == ()
        whole = create_remote_buffer(half, 2, shard_over=1)
        assert (whole.tensor_shape, whole.meta_shape) == ((2, 4), ())
        cut = create_remote_buffer(half)  # over all replicas
        assert (cut.tensor_shape, cut.meta_shape) == ((2,), (2, 4))
        pairs = ir.replica_grouping(group_size=2)
        assert create_remote_buffer(half, 1, pairs).tensor_shape == (4,)
        with pytest.raises(ValueError, match="equal parts"):
            create_remote_buffer(popxl.TensorSpec((3, 2), popxl.float16))
        with pytest.raises(ValueError, match="must divide the group size"):
            create_remote_buffer(half, 1, pairs, shard_over=4)


@pytest.mark.parametrize("graph_of", [load_remote_graph, store_remote_graph])
def test_buffers_grow_to_the_entries_that_are_used(graph_of):
    ir = popxl.Ir()
    with ir.main_graph:
        buffers = named_variable_buffers(factories(), entries=2)
        graph_of(buffers, 3)
        assert [b.entries for b in buffers.values_flat()] == [3, 3]
        graph_of(buffers, 1)
        assert [b.entries for b in buffers.values_flat()] == [3, 3]


def test_names_are_sorted_as_text():
    """Dotted names as a whole: "a.z" is before "a1", and "10" before "9"."""
    ir = popxl.Ir()
    names = ["b", "a1", "a.z", "a.b", "9", "10", "a_"]
    with ir.main_graph:
        facts = {n: VariableFactory(float(i), name="v") for i, n in enumerate(names)}
        buffers = named_variable_buffers(NamedVariableFactories.from_dict(facts))
        NamedVariableFactories.from_dict(facts).init_remote(buffers)
        load, found = load_remote_graph(buffers)
        store = store_remote_graph(buffers)
        values = load.call(0)
        store.bind(NamedTensors.pack(found, values)).call(0)
        streams = [popxl.d2h_stream((), popxl.float32) for _ in values]
        for stream, t in zip(streams, values, strict=True):
            ops.host_store(stream, t)
    assert found == sorted(names)
    assert sorted(store.args.keys_flat()) == found
    assert [store.args.get(n) for n in found] == list(store.graph.inputs[1:])
    with popxl.Session(ir) as session:
        out = session.run()
    assert [out[s] for s in streams] == [names.index(n) for n in found]
