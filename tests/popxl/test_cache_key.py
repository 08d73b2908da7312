"""The cache key: equal segments share it, different segments never do."""

from __future__ import annotations

from contextlib import suppress

import jax
import numpy as np
import pytest

import popxl
from popxl import ops
from popxl._compile import cache_key
from popxl._compile.cache_key import UncacheableError, segment_key, segment_lines
from popxl._devices import cpu
from popxl._devices.mesh import replica_mesh
from popxl._ir.op_registry import define
from popxl._run.program import Program
from popxl.ops._emit import emit
from popxl.transforms import autodiff


def _program(ir: popxl.Ir) -> Program:
    return Program(ir, replica_mesh("cpu", ir.replication_factor))


def _keys(program: Program) -> tuple[str, ...]:
    """The keys of its segments."""
    return tuple(segment_key(program, s) for s in program.schedule.segments)


def _key(build, replicas: int = 1, transfers: int = 1) -> tuple[str, ...]:
    return _keys(_program(_ir(build, replicas, transfers)))


def _ir(build, replicas: int = 1, transfers: int = 1) -> popxl.Ir:
    ir = popxl.Ir(replication=replicas)
    ir.num_host_transfers = transfers
    with ir.main_graph:
        build(ir)
    return ir


def _base(ir, **changes):
    """A program of one segment, of which each argument changes one fact."""
    fact = {
        "value": 2.0, "initial": 1.0, "shape": (3,), "name": "w", "count": 3, "inplace": True,
        "large": 0.0, "group": 2, "used": True, "of": "gelu",
        "by_ref": True, "modified": False, "stream": "y",
    } | changes  # fmt: skip
    w = popxl.variable(np.full(fact["shape"], fact["initial"], np.float32), name=fact["name"])
    constant = popxl.constant(fact["value"])
    large = popxl.constant(np.full(4096, fact["large"], np.float32))
    seen = popxl.variable(np.zeros(fact["shape"], np.float32), name="seen")
    annotation = popxl.TensorByRef if fact["by_ref"] else popxl.Tensor

    def step(x: annotation, c, seen: popxl.TensorByRef):  # type: ignore[valid-type]
        ops.add_(x, c)
        y = getattr(ops, fact["of"])(x) if fact["used"] else x
        ops.add_(seen, y)

    step.__annotations__["x"] = annotation
    graph = ir.create_graph(step, w, constant, seen)
    info = ops.call_with_info(graph, w, constant, seen)
    if fact["modified"]:
        info.set_parent_input_modified(w)
    ops.repeat(graph, fact["count"], w, constant, seen)
    (ops.add_ if fact["inplace"] else ops.add)(w, ops.sum(large))
    groups = ir.replica_grouping(group_size=fact["group"])
    reduced = ops.collectives.replicated_all_reduce(w, group=groups)
    out = popxl.d2h_stream(fact["shape"], popxl.float32, fact["stream"])
    ops.host_store(out, reduced)


def test_equal_programs_have_equal_keys_whatever_came_before():
    keys = {_key(_base, 4) for _ in range(2)}
    popxl.Ir(), popxl.Ir()
    assert keys == {_key(_base, 4)}


@pytest.mark.parametrize(
    "change",
    [
        {"value": 3.0}, {"value": -0.0}, {"shape": (4,)}, {"count": 4}, {"inplace": False},
        {"group": 4}, {"used": False}, {"of": "tanh"}, {"by_ref": False},
        {"by_ref": False, "modified": True},
    ],
    ids=str,
)  # fmt: skip
def test_each_fact_of_a_program_changes_the_key(change):
    assert _key(lambda ir: _base(ir, **change), 4) != _key(_base, 4)


def test_by_reference_and_marked_calls_differ():
    by_value = _key(lambda ir: _base(ir, by_ref=False), 4)
    assert _key(lambda ir: _base(ir, by_ref=False, modified=True), 4) != by_value


@pytest.mark.parametrize(
    "change", [{"initial": 7.0}, {"large": 5.0}, {"name": "v"}, {"stream": "z"}], ids=str
)
def test_data_that_is_an_argument_and_names_do_not_change_the_key(change):
    assert _key(lambda ir: _base(ir, **change), 4) == _key(_base, 4)


def test_replicas_change_the_key_and_transfers_that_of_a_segment_with_streams():
    def build(ir):
        w = popxl.variable(1.0)
        ops.add_(w, popxl.constant(1.0))
        return w

    def build_with_stream(ir):
        ops.host_store(popxl.d2h_stream((), popxl.float32, "y"), build(ir))

    assert _key(build) != _key(build, 2)
    assert _key(build) == _key(build, 1, 2)
    assert _key(build_with_stream) != _key(build_with_stream, 1, 2)


def test_session_options_that_matter_change_the_key_and_paths_do_not():
    def key(**options):
        ir = _ir(_base, 4)
        for name, value in options.items():
            setattr(ir._pb_ir.getSessionOptions(), name, value)
        return _keys(_program(ir))

    assert key(throwIfLog2ScaleTensorNotInRange=False) != key()
    assert key(cachePath="elsewhere", logDir="logs", enableEngineCaching=True) == key()


def test_flags_of_xla_and_switches_change_the_key(monkeypatch):
    program = _program(_ir(_base, 4))
    before = _keys(program)
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    with_flags = _keys(program)
    monkeypatch.setitem(cache_key.__dict__, "_cpu_description", lambda: "another processor")
    with_processor = _keys(program)
    assert len({before, with_flags, with_processor}) == 3


def test_a_switch_and_the_same_flag_are_one_fact(monkeypatch):
    """Another process may find one in its flags that this one has among its switches."""
    name, program = "xla_cpu_enable_fast_math", _program(_ir(_base, 4))
    before = _keys(program)
    monkeypatch.setitem(cpu.COMPILER_OPTIONS, name, False)
    with_switch = _keys(program)
    monkeypatch.setenv("XLA_FLAGS", f"--{name}=false")
    with_both = _keys(program)
    monkeypatch.delitem(cpu.COMPILER_OPTIONS, name)
    assert _keys(program) == with_both
    assert len({before, with_switch, with_both}) == 3


@pytest.mark.parametrize("name", cache_key._JAX_SETTINGS)
def test_settings_of_jax_change_the_key(name):
    former, others = jax.config.values[name], [True, False, "highest", "rbg", "strict"]
    program = _program(_ir(_base, 4))
    before = _keys(program)
    try:
        for other in others:
            with suppress(ValueError, TypeError):
                jax.config.update(name, other)
                if jax.config.values[name] != former:
                    assert _keys(program) != before
                    return
        pytest.fail(f"{name} took none of {others}")
    finally:
        jax.config.update(name, former)


def test_what_a_differentiated_loop_repeats_is_in_the_key():
    """`repeat_grad` runs the loop again, as often as the loop ran."""

    def key(count):
        def build(ir):
            x = popxl.variable(np.ones(2, np.float32))
            step = ir.create_graph(lambda y: ops.sin(y), x)

            def loop(y):
                return ops.repeat(step, count, y)

            forward = ir.create_graph(loop, x)
            info = autodiff(forward)
            call = ops.call_with_info(forward, x)
            ops.call(info.graph, x, inputs_dict=info.inputs_dict(call))

        return _key(build)

    assert key(2) != key(3)
    assert key(2) == key(2)


def test_the_key_holds_no_addresses_and_no_ids_of_the_ir():
    programs = [_program(_ir(_base, 4)) for _ in range(2)]
    lines = [
        [x for s in p.schedule.segments for x in segment_lines(p.ir, "cpu", s)] for p in programs
    ]
    assert lines[0] == lines[1]
    assert not [line for line in lines[0] if " at 0x" in line]


# ---- segments of one program --------------------------------------------------------------------
W = 4


def _segment_keys(build) -> list[str]:
    """Keys of the segments of a main graph that `build(ir, a, b, buffer)` writes."""

    def whole(ir):
        a, b = (popxl.variable(np.ones(W, np.float32), name=name) for name in "ab")
        build(ir, a, b, popxl.remote_buffer((W,), popxl.float32, 4))

    return list(_key(whole))


def test_equal_segments_of_a_program_share_a_key():
    def build(ir, a, b, buffer):
        for row in range(4):  # each waits for the store before it
            ops.remote_store(buffer, row, ops.tanh(ops.remote_load(buffer, row)))

    keys = _segment_keys(build)
    assert len(keys) == 4
    assert len(set(keys)) == 1


def test_segments_that_take_their_arguments_otherwise_differ():
    """Each stores another function of two entries."""

    def key(function):
        def build(ir, a, b, buffer):
            x, y = (ops.remote_load(buffer, i) for i in range(2))
            ops.remote_store(buffer, 2, function(x, y))

        (found,) = _segment_keys(build)
        return found

    keys = [
        key(lambda x, y: x - y), key(lambda x, y: y * 1.0), key(lambda x, y: x - x),
        key(lambda x, y: ops.slice(x - y, W - 1, None, -1)),
        key(lambda x, y: x - ops.slice_(y, W - 1, None, -1)),
        key(lambda x, y: (x - y).reshape_((2, 2)).T_.reshape((W,))),
    ]  # fmt: skip
    assert len(set(keys)) == len(keys)
    assert key(lambda x, y: x - y) == key(lambda x, y: x - y) == key(lambda x, y: y - x)


def test_loads_into_different_views_differ():
    def keys(start):
        def build(ir):
            v = popxl.variable(np.zeros((3, W), np.float32))
            buffer = popxl.remote_buffer((1, W), popxl.float32, 1)
            ops.remote_load_(buffer, 0, ops.slice_(v, start, start + 1))
            ops.add_(v, popxl.constant(1.0))

        return _key(build)

    assert len({keys(0), keys(1), keys(2)}) == 3
    assert keys(1) == keys(1)


def test_who_gives_memory_and_who_is_a_number_is_in_the_key():
    program = _program(_ir(lambda ir: ops.add_(popxl.variable(1.0), popxl.constant(2.0))))
    (segment,) = program.schedule.segments
    before = segment_key(program, segment)
    assert segment.donated == (0,)
    segment.donated = ()
    kept = segment_key(program, segment)
    segment.scalar_args = frozenset({0})
    assert len({before, kept, segment_key(program, segment)}) == 3


def test_results_that_are_asked_for_are_in_the_key():
    def build(more: bool):
        def write(ir):
            a = popxl.variable(np.ones(W, np.float32))
            buffer = popxl.remote_buffer((W,), popxl.float32, 2)
            x = ops.tanh(a)
            y = x + 1.0
            ops.remote_store(buffer, 0, y)
            if more:
                ops.remote_store(buffer, 1, x)

        return write

    assert _key(build(False)) != _key(build(True))


HOLDS = define("holds_anything_for_test", lambda x, **attrs: x, infer=lambda spec, **_: [spec])


@pytest.mark.parametrize("value", [object(), lambda: 0, {1, 2}])
def test_an_attribute_that_cannot_be_written_down_makes_a_program_uncacheable(value):
    ir = _ir(lambda ir: emit(HOLDS, [popxl.variable(1.0)], {"value": value}))
    with pytest.raises(UncacheableError, match=r"holds_anything_for_test at .*test_cache_key.py"):
        _keys(_program(ir))


def _attribute_key(value) -> str:
    text = cache_key._SegmentWriter("cpu", {}).attribute_text(value)
    assert text == cache_key._SegmentWriter("cpu", {}).attribute_text(value)
    return text


def test_attributes_that_differ_are_written_differently():
    values = [
        None, True, 1, 1.0, "1", b"1", -0.0, 0.0, (1,), [1], ((1,),), (1, 2), {"a": 1}, {"a": 2},
        popxl.float32, popxl.float16, np.float32(1), np.int32(1), np.dtype("f4"),
        np.arange(3), np.arange(4), np.arange(3.0), popxl.TensorSpec((1,), popxl.float32),
        popxl.TensorSpec((1,), popxl.float32, (2,)),
    ]  # fmt: skip
    assert len({_attribute_key(v) for v in values}) == len(values)
