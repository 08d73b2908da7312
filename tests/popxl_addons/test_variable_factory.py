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
    with pytest.raises(ValueError, match="'w' is .*, no array: give arrays"):
        VariableFactory(lambda: object(), name="w")
    with pytest.raises(ValueError, match="a callable, an iterable or an array"):
        VariableFactory(None)


def test_what_a_callable_raises_is_told_at_once_and_without_a_graph():
    def fail():
        raise KeyError("no such weight")

    with pytest.raises(ValueError, match=r"'w' cannot be made: KeyError: .*no such weight"):
        VariableFactory(fail, name="w")


def test_sharded_input_is_flat_and_keeps_the_whole_shape(ir):
    with ir.create_empty_graph("g"):
        t, factory = add_replica_sharded_variable_input("w", lambda: np.zeros((2, 4)))
        assert (t.shape, t.meta_shape) == ((8 // ir.replication_factor,), (2, 4))
    assert factory.shape_on_host == (2, 4)


@pytest.mark.parametrize(("shape", "shards", "part"), [((8,), 2, 4), ((5, 3), 2, 7), ((9,), 3, 3)])
def test_a_factory_of_shards_makes_ordinary_variables_too(ir, shape, shards, part):
    """The number of shards need not divide the elements, nor the size of the group."""
    factory = VariableFactory(lambda: np.ones(shape), name="w", shard_over=shards)
    assert (factory.shape, factory.meta_shape) == ((part,), shape)
    variable = factory.create_tensor()
    assert (variable.shape, variable.meta_shape) == (shape, ())
    assert variable.shape_on_host == factory.shape_on_host == shape


def test_shards_must_not_exceed_the_group(ir):
    size = ir.replication_factor
    for wrong in (0, size + 1):
        with pytest.raises(ValueError, match=f"shard_over={wrong} must be from 1 to {size}"):
            VariableFactory(lambda: np.zeros(8), shard_over=wrong)


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
    with pytest.raises(ValueError, match=r"float32 of shape \(2,\), but .* shape \(3,\)"):
        VariableFactory(np.ones(3)).next_memmap(str(tmp_path), "w")
    (tmp_path / "arrays.json").unlink()  # files of other programs
    with pytest.raises(ValueError, match=r"of shape \(3,\) needs 12"):
        VariableFactory(np.ones(3)).next_memmap(str(tmp_path), "w")


@pytest.mark.parametrize("dtype", [popxl.float32, popxl.bfloat16, popxl.float16])
def test_a_map_holds_the_elements_alone_with_the_groups_in_front(tmp_path, dtype):
    ir = popxl.Ir(replication=2)
    with ir.main_graph:
        alone = ir.replica_grouping(group_size=1)
        draws = iter(np.arange(6.0).reshape(2, 3))
        factory = VariableFactory(draws, dtype, "w", replica_grouping=alone)
        mapped = factory.next_memmap(str(tmp_path), "w")
    mapped.flush()
    raw = np.fromfile(tmp_path / "w.npy", dtype.as_numpy())
    assert raw.astype(np.float32).tolist() == list(range(6))
    assert mapped.shape == (2, 3)
    np.asarray([7] * 6, dtype.as_numpy()).tofile(tmp_path / "w.npy")
    with ir.main_graph:
        again = factory.next_memmap(str(tmp_path), "w")
    assert np.asarray(again, np.float32).tolist() == [[7] * 3] * 2


def test_a_seeded_generator_gives_the_same_data_whatever_the_order_of_the_tree(ir):
    found = []
    for names in (["a", "b.c", "b.a"], ["b.a", "b.c", "a"]):
        draws = iter(np.arange(10.0))
        facts = NamedVariableFactories.from_dict({n: VariableFactory(0.0, name=n) for n in names})
        for factory in facts.values_flat():
            factory.data_iter = draws
        variables = facts.init()
        assert variables.keys_flat() == ["a", "b.a", "b.c"]
        with popxl.Session(ir) as session:
            values = {n: float(session.get_tensor_data(t)) for n, t in variables.to_dict().items()}
        found.append(values)
    assert found[0] == found[1] == {"a": 0, "b.a": 1, "b.c": 2}
