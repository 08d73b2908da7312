"""The context of a program being written: current graph, scopes, placement, ordering."""

from __future__ import annotations

import threading

import pytest

import popxl
from popxl import context, ops
from popxl.errors import UndefinedValue


# Made at import time, with no graph active.
@popxl.name_scope("decorated")
def scoped(x):
    return ops.add(x, x)


@popxl.ipu(3)
@popxl.io_tiles()
@popxl.in_sequence()
def placed(x):
    return ops.add(x, x)


def test_outside_any_graph_the_message_says_how_to_enter_one():
    for get in (popxl.gcg, popxl.gmg, popxl.gir, popxl.get_current_graph):
        with pytest.raises(RuntimeError, match="with ir.main_graph"):
            get()


def test_the_current_graph_follows_the_with_blocks(ir):
    graph = ir.create_empty_graph("g")
    assert (popxl.gcg(), popxl.gmg(), popxl.gir()) == (ir.main_graph, ir.main_graph, ir)
    with graph:
        assert popxl.gcg() is graph
        assert popxl.gmg() is ir.main_graph
        other = popxl.Ir()
        with pytest.raises(RuntimeError, match="of another Ir"), other.main_graph:
            pass
        assert popxl.gcg() is graph
    assert popxl.gcg() is ir.main_graph


def test_a_graph_is_left_when_its_block_raises(ir):
    with pytest.raises(KeyError), ir.create_empty_graph("g"):
        raise KeyError
    assert popxl.gcg() is ir.main_graph


def test_each_thread_writes_its_own_program(ir):
    found = []

    def other():
        try:
            popxl.gcg()
        except RuntimeError as error:
            found.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert len(found) == 1


# ---- name scopes --------------------------------------------------------------------------------
def test_scopes_nest_and_prefix_names(ir):
    with popxl.name_scope("outer"), popxl.name_scope("inner"):
        x = popxl.variable(1.0, name="x")
        y = x + x
    assert x.name == x.id == "outer/inner/x"
    assert x.scope == "outer/inner"
    assert y.id == "outer/inner/add_out"
    assert scoped(x).id == "decorated/add_out"
    assert scoped(x).id == "decorated/add_out__t0"


def test_scopes_belong_to_a_graph(ir):
    with popxl.name_scope("main_only"):
        graph = ir.create_graph(lambda x: x + x, popxl.variable(1.0))
    assert graph.outputs[0].name == "add_out"
    with graph, popxl.name_scope("inside"):
        assert (graph.inputs[0] * 2.0).scope == f"{graph.name}/inside"


def test_names_are_made_unique(ir):
    names = [popxl.variable(1.0, name="w").name for _ in range(3)]
    assert names == ["w", "w__t0", "w__t1"]


def test_a_scope_ends_when_its_block_raises(ir):
    with pytest.raises(KeyError), popxl.name_scope("scope"):
        raise KeyError
    assert popxl.variable(1.0, name="x").name == "x"


# ---- placement ----------------------------------------------------------------------------------
def test_ops_are_placed_and_results_follow_their_inputs(ir):
    with popxl.ipu(2):
        x = popxl.variable(1.0) + popxl.constant(1.0)
    assert x.ipu == 2
    y = x * x
    assert y.location_info == (2, "compute")
    assert placed(popxl.variable(1.0)).location_info == (3, "io")
    assert (popxl.variable(1.0) * 2.0).ipu == 0


def test_ops_without_an_ipu_make_tensors_of_unknown_place(ir):
    with popxl.ipu(None):
        x = popxl.variable(1.0) * 2.0
    with pytest.raises(UndefinedValue):
        _ = x.ipu
    with pytest.raises(ValueError, match="give `source`"):
        ops.ipu_copy(x, 1)
    assert ops.ipu_copy(x, 1, source=2).ipu == 1


def test_a_copy_is_where_it_was_copied_to_and_says_where_its_source_is(ir):
    x, v = popxl.variable(1.0), popxl.variable(2.0)
    with popxl.ipu(1):
        assert ops.ipu_copy(x + 1.0, 3).ipu == 3
        ops.ipu_copy(v, 3, source=2)
    assert v.ipu == 2


def test_an_input_is_where_its_argument_is_or_where_it_is_used(ir):
    with popxl.ipu(4):
        argument = popxl.variable(1.0) + 1.0
    called = ir.create_graph(lambda x: popxl.ipu(2)(lambda: x * 2.0)(), argument)
    (used,) = called.inputs
    assert used.ipu == 2  # where an op takes it, as long as there is no call
    with popxl.ipu(None):
        ops.call(called, argument)
    assert used.ipu == 4
    free = ir.create_graph(lambda x, unused: x, argument, argument).inputs
    for t in free:
        with pytest.raises(UndefinedValue):
            _ = t.ipu


def test_calls_take_inputs_from_anywhere(ir):
    with popxl.ipu(0):
        a = popxl.variable(1.0) + 1.0
    with popxl.ipu(1):
        b = popxl.variable(2.0) + 1.0
    with popxl.io_tiles():
        c = popxl.variable(3.0) + 1.0
    graph = ir.create_graph(lambda x, y, z: x + y + z, a, b, c)
    for build in (
        lambda: ops.call(graph, a, b, c),
        lambda: ops.repeat(graph, 2, a, b, c),
        lambda: ops.conditional(popxl.constant(True), graph, graph, [a, b, c], [c, b, a]),
    ):
        assert len(build()) == 1
    with pytest.raises(ValueError, match="on IPU"):
        a + b


def test_a_mode_of_none_is_no_mode(ir):
    with pytest.raises(TypeError, match="not None"):
        popxl.in_sequence(None)


def test_a_bare_variable_has_no_place(ir):
    x = popxl.variable(1.0, name="bare")
    with pytest.raises(UndefinedValue, match="bare"):
        _ = x.ipu
    with pytest.raises(UndefinedValue, match="bare"):
        _ = x.tile_set


def test_tensors_of_different_places_cannot_meet(ir):
    x = popxl.variable(1.0)
    with popxl.ipu(0):
        a = x + 1.0
    with popxl.ipu(1):
        b = x + 1.0
    with pytest.raises(ValueError, match="input 0 .* is on IPU 0, but input 1 .* is on IPU 1"):
        a + b
    assert (a.copy_to_ipu(1) + b).ipu == 1
    with popxl.io_tiles():
        c = x + 1.0
    with pytest.raises(ValueError, match="in tile set compute, but input 1 .* in tile set io"):
        a + c
    assert (ops.io_tile_copy(c) + a).tile_set == "compute"


def test_places_are_checked_by_the_names_of_the_arguments(ir):
    bare = popxl.variable(1.0)
    with popxl.ipu(0):
        a = bare + 1.0
    with popxl.ipu(1):
        b = bare + 1.0
    with popxl.io_tiles():
        c = bare + 1.0
    check = ops.utils.check_tensor_ipu_and_tile_set
    check(t1=bare, t2=a, t3=a)
    with pytest.raises(ValueError, match=r"t2 \(.*IPU 0, but t4 \(.*IPU 1"):
        check(t1=bare, t2=a, t3=bare, t4=b, t5=b)
    with pytest.raises(ValueError, match=r"lhs \(.*tile set compute, but rhs \(.*tile set io"):
        check(lhs=a, rhs=c)


# ---- exchanges ----------------------------------------------------------------------------------
def test_an_exchange_is_of_ops_that_do_not_depend_on_each_other(ir):
    buffer = popxl.remote_buffer((2,), popxl.float32, 2)
    stream = popxl.h2d_stream((2,), popxl.float32)
    with popxl.transforms.io_tile_exchange():
        loaded = ops.remote_load(buffer, 0)
        target = ops.init((2,), popxl.float32)
        ops.remote_load_(buffer, 1, target)
        ops.host_load(stream)
    assert loaded.tile_set == "io"
    with popxl.transforms.io_tile_exchange():
        ops.remote_store(buffer, 0, loaded)
    with (
        pytest.raises(RuntimeError, match=r"remote_store.* depends on .*remote_load"),
        popxl.transforms.io_tile_exchange(),
    ):
        ops.remote_store(buffer, 1, ops.remote_load(buffer, 0))

    def load_and_store():
        with popxl.transforms.io_tile_exchange():
            ops.remote_load_(buffer, 1, target)
            ops.remote_store(buffer, 0, target)

    with pytest.raises(RuntimeError, match=r"remote_store.* depends on .*remote_load_"):
        load_and_store()
    with popxl.transforms.io_tile_exchange(verify_overlap=False):
        ops.remote_store(buffer, 1, ops.remote_load(buffer, 0))


def test_an_error_inside_an_exchange_is_the_program_s_own(ir):
    buffer = popxl.remote_buffer((2,), popxl.float32, 2)

    def fails():
        with popxl.transforms.io_tile_exchange():
            ops.remote_store(buffer, 1, ops.remote_load(buffer, 0))
            raise KeyError("mine")

    with pytest.raises(KeyError):
        fails()
    assert not context.get_current_context()._hooks


def test_a_copy_needs_a_known_source(ir):
    x = popxl.variable(1.0)
    with pytest.raises(ValueError, match="not known"):
        ops.ipu_copy(x, 1)
    assert x.copy_to_ipu(1, 0).ipu == 1


# ---- ordering and hooks -------------------------------------------------------------------------
def test_ordering_is_recorded(ir):
    x = popxl.variable(1.0)
    with popxl.in_sequence():
        x + x
        with popxl.in_sequence(False):
            x + x
        with popxl.in_sequence("pass"):
            x + x
    x + x
    assert [op.in_sequence for op in ir.main_graph.ops] == [True, False, True, False]


def test_context_hooks_see_ops_of_all_graphs(ir):
    seen = []
    handle = context.get_current_context().register_op_created_hook(lambda op: seen.append(op.name))
    x = popxl.variable(1.0)
    graph = ir.create_graph(lambda y: y * y, x)
    ops.call(graph, x)
    context.get_current_context().remove_op_created_hook(handle)
    x + x
    assert seen == ["mul", "call"]


def test_locations_are_the_user_s_lines(ir):
    popxl.variable(1.0) + popxl.variable(2.0)
    location = ir.main_graph.ops[0].location
    path, _, line = location.rpartition(":")
    assert path == __file__
    with open(__file__) as file:
        assert "popxl.variable(2.0)" in file.readlines()[int(line) - 1]
