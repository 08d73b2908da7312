import itertools

import numpy as np
import pytest

import popxl
from popxl import ops
from popxl_addons.remote import named_variable_buffers
from popxl_addons.variable_factory import (
    NamedVariableFactories,
    VariableFactory,
    add_replica_sharded_variable_input,
    add_variable_input,
)


@pytest.fixture
def ir():
    ir = popxl.Ir(replication=4)
    with ir.main_graph:
        yield ir


def counting():
    numbers = itertools.count()
    return lambda: np.full((2,), next(numbers), np.float32)


def test_spec_comes_from_the_first_item_which_is_used_first(ir):
    factory = VariableFactory(counting(), name="w")
    assert (factory.shape, factory.dtype) == ((2,), popxl.float32)
    assert [factory.next_data()[0] for _ in range(3)] == [0, 1, 2]


def test_64_bit_data_becomes_32_bit_unless_a_dtype_is_given(ir):
    assert VariableFactory(np.zeros(2)).dtype == popxl.float32
    assert VariableFactory(np.zeros(2), popxl.float16).dtype == popxl.float16


@pytest.mark.parametrize("data", [np.ones((2, 3), np.float32), 5.0, np.float32(5)])
def test_one_array_serves_all_variables(ir, data):
    factory = VariableFactory(data)
    assert factory.shape == np.shape(data)
    for _ in range(2):
        np.testing.assert_array_equal(factory.next_data(), data)


def test_each_group_of_replicas_gets_an_item(ir):
    grouping = ir.replica_grouping(group_size=2)
    factory = VariableFactory(counting(), replica_grouping=grouping)
    variable = factory.create_tensor("w")
    assert variable.shape == (2,)
    assert variable.shape_on_host == (2, 2)
    assert factory.next_data().tolist() == [[2, 2], [3, 3]]


def test_data_run_out(ir):
    factory = VariableFactory(iter([np.zeros(2)]), name="w")
    factory.next_data()
    with pytest.raises(ValueError, match="'w' are exhausted"):
        factory.next_data()


def test_items_must_keep_their_shape(ir):
    factory = VariableFactory([np.zeros(2), np.zeros(3)], name="w")
    factory.next_data()
    with pytest.raises(ValueError, match=r"'w' has shape \(3,\)"):
        factory.next_data()


def test_items_must_be_arrays(ir):
    with pytest.raises(TypeError, match="'w' must be arrays"):
        VariableFactory(lambda: object(), name="w")


def test_sharded_input_is_flat_and_keeps_the_whole_shape(ir):
    with ir.create_empty_graph("g"):
        t, factory = add_replica_sharded_variable_input("w", lambda: np.zeros((3, 3)))
        assert (t.shape, t.meta_shape) == ((3,), (3, 3))
        tiny, small = add_replica_sharded_variable_input("s", lambda: np.zeros(3))
        assert (tiny.shape, tiny.meta_shape) == ((3,), ())
    assert factory.shape_on_host == (3, 3)
    assert not small.replica_sharded
    with pytest.raises(ValueError, match="init_remote"):
        factory.create_tensor()


def test_shards_must_divide_the_group(ir):
    with ir.create_empty_graph("g"), pytest.raises(ValueError, match="shard_over=3 must divide"):
        add_replica_sharded_variable_input("w", lambda: np.zeros(8), shard_over=3)


def test_inputs_by_reference(ir):
    graph = ir.create_empty_graph("g")
    with graph:
        t, factory = add_variable_input("w", np.zeros(2), by_ref=True)
        ops.var_updates.accumulate_(t, popxl.constant(np.ones(2, np.float32)))
    variable = factory.create_tensor()
    ops.call(graph, variable)
    with popxl.Session(ir) as session:
        session.run()
    assert session.get_tensor_data(variable).tolist() == [1, 1]


# ---- trees --------------------------------------------------------------------------------------
def two(ir):
    with ir.create_empty_graph("g"):
        return NamedVariableFactories(
            w=add_variable_input("w", counting())[1],
            deep=NamedVariableFactories(
                b=add_variable_input("b", counting(), replica_grouping=ir.replica_grouping(2))[1]
            ),
        )


def test_init_names_variables_after_the_tree(ir):
    variables = two(ir).init("layer")
    assert variables.w.name == "layer.w"
    assert variables.deep.b.name == "layer.deep.b"


def test_groupings_by_name(ir):
    groupings = two(ir).replica_groupings
    assert groupings.w == ir.replica_grouping()
    assert groupings.deep.b == ir.replica_grouping(2)


def test_empty_variables_are_zero_and_draw_nothing(ir):
    factories = two(ir)
    assert not factories.init(empty=True).w._data.any()
    assert factories.w.next_data()[0] == 0  # the first draw is still there


def test_init_remote_takes_an_entry_of_each_buffer(ir):
    factories = two(ir)
    buffers = named_variable_buffers(factories, entries=2, shard_over_dict=False)
    first, second = (factories.init_remote(buffers, i, f"layer{i}") for i in range(2))
    with popxl.Session(ir) as session:
        data = session.get_tensors_data([first.w, second.w, second.deep.b])
    assert [d.ravel()[0] for d in data.values()] == [0, 1, 2]


def test_init_zero_makes_tensors_in_any_graph(ir):
    factories = two(ir)
    with ir.create_empty_graph("h") as graph:
        zeros = factories.init_zero()
        assert zeros.w in graph
        assert factories.init_undef().deep.b.shape == (2,)


# ---- memory maps --------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [popxl.float32, popxl.bfloat16])
def test_memory_maps_keep_variables_between_programs(tmp_path, dtype):
    for run in range(2):
        ir = popxl.Ir()
        with ir.main_graph:
            factories = NamedVariableFactories(
                w=VariableFactory(lambda: np.ones((2,)), dtype, "w", by_ref=True)
            )
            variables = factories.init(memmap_dir=str(tmp_path))
            ops.var_updates.accumulate_(variables.w, popxl.constant(np.ones(2), dtype))
        with popxl.Session(ir) as session:
            session.run()
        assert session.get_tensor_data(variables.w).astype(np.float32).tolist() == [run + 2.0] * 2


def test_a_read_only_map_is_not_written(tmp_path, ir):
    factory = VariableFactory(np.ones(2), name="w")
    factory.next_memmap(str(tmp_path), "w")
    assert not factory.next_memmap(str(tmp_path), "w", read_only_if_exists=True).flags.writeable


def test_a_map_of_another_variable_is_refused(tmp_path, ir):
    VariableFactory(np.ones(2)).next_memmap(str(tmp_path), "w")
    with pytest.raises(ValueError, match=r"needs float32 \(3,\)"):
        VariableFactory(np.ones(3)).next_memmap(str(tmp_path), "w")
