"""The cache key: equal programs share it, different programs never do."""

from __future__ import annotations

import numpy as np
import pytest

import popxl
from popxl import ops
from popxl._core.op import emit
from popxl._core.opdef import define
from popxl._lower import fingerprint
from popxl._lower.devices import replica_mesh
from popxl._lower.fingerprint import Uncacheable, program_key, program_lines
from popxl._lower.program import Program
from popxl.transforms import autodiff


def _program(ir: popxl.Ir) -> Program:
    return Program(ir, replica_mesh("cpu", ir.replication_factor))


def _key(build, replicas: int = 1, transfers: int = 1) -> str:
    return program_key(_program(_ir(build, replicas, transfers)))


def _ir(build, replicas: int = 1, transfers: int = 1) -> popxl.Ir:
    ir = popxl.Ir(replication=replicas)
    ir.num_host_transfers = transfers
    with ir.main_graph:
        build(ir)
    return ir


def _base(ir, **changes):
    """A program of which each argument changes one fact."""
    fact = {
        "value": 2.0, "initial": 1.0, "shape": (3,), "name": "w", "count": 3, "inplace": True,
        "large": 0.0, "entries": 2, "offset": 0, "group": 2, "used": True, "of": "gelu",
        "by_ref": True, "modified": False, "stream": "y",
    } | changes  # fmt: skip
    w = popxl.variable(np.full(fact["shape"], fact["initial"], np.float32), name=fact["name"])
    constant = popxl.constant(fact["value"])
    large = popxl.constant(np.full(4096, fact["large"], np.float32))
    buffer = popxl.remote_buffer(fact["shape"], popxl.float32, fact["entries"])
    annotation = popxl.TensorByRef if fact["by_ref"] else popxl.Tensor

    def step(x: annotation, c):  # type: ignore[valid-type]
        ops.add_(x, c)
        y = getattr(ops, fact["of"])(x) if fact["used"] else x
        ops.remote_store(buffer, fact["offset"], y)

    step.__annotations__["x"] = annotation
    graph = ir.create_graph(step, w, constant)
    info = ops.call_with_info(graph, w, constant)
    if fact["modified"]:
        info.set_parent_input_modified(w)
    ops.repeat(graph, fact["count"], w, constant)
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
        {"value": 3.0}, {"value": -0.0}, {"shape": (4,)}, {"name": "v"}, {"count": 4},
        {"inplace": False}, {"entries": 3}, {"offset": 1}, {"group": 4}, {"used": False},
        {"of": "tanh"}, {"by_ref": False}, {"by_ref": False, "modified": True}, {"stream": "z"},
    ],
    ids=str,
)  # fmt: skip
def test_each_fact_of_a_program_changes_the_key(change):
    assert _key(lambda ir: _base(ir, **change), 4) != _key(_base, 4)


def test_by_reference_and_marked_calls_differ():
    by_value = _key(lambda ir: _base(ir, by_ref=False), 4)
    assert _key(lambda ir: _base(ir, by_ref=False, modified=True), 4) != by_value


@pytest.mark.parametrize("change", [{"initial": 7.0}, {"large": 5.0}], ids=str)
def test_data_that_is_an_argument_of_the_program_does_not_change_the_key(change):
    assert _key(lambda ir: _base(ir, **change), 4) == _key(_base, 4)


def test_replicas_and_transfers_change_the_key():
    def build(ir):
        ops.add_(popxl.variable(1.0), popxl.constant(1.0))

    assert len({_key(build), _key(build, 2), _key(build, 1, 2)}) == 3


def test_session_options_that_matter_change_the_key_and_paths_do_not():
    def key(**options):
        ir = _ir(_base, 4)
        for name, value in options.items():
            setattr(ir._pb_ir.getSessionOptions(), name, value)
        return program_key(_program(ir))

    assert key(throwIfLog2ScaleTensorNotInRange=False) != key()
    assert key(cachePath="elsewhere", logDir="logs", enableEngineCaching=True) == key()


def test_flags_of_xla_and_switches_change_the_key(monkeypatch):
    program = _program(_ir(_base, 4))
    before = program_key(program)
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    with_flags = program_key(program)
    monkeypatch.setitem(fingerprint.__dict__, "_processor", lambda: "another processor")
    assert len({before, with_flags, program_key(program)}) == 3


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
    lines = [list(program_lines(_program(_ir(_base, 4)))) for _ in range(2)]
    assert lines[0] == lines[1]
    assert not [line for line in lines[0] if " at 0x" in line]


HOLDS = define("holds_anything_for_test", lambda x, **attrs: x, infer=lambda spec, **_: [spec])


@pytest.mark.parametrize("value", [object(), lambda: 0, {1, 2}])
def test_an_attribute_that_cannot_be_written_down_makes_a_program_uncacheable(value):
    ir = _ir(lambda ir: emit(HOLDS, [popxl.variable(1.0)], {"value": value}))
    with pytest.raises(Uncacheable, match=r"holds_anything_for_test at .*test_fingerprint.py"):
        program_key(_program(ir))


def _attribute_key(value) -> str:
    text = fingerprint._value(value)
    assert text == fingerprint._value(value)
    return text


def test_attributes_that_differ_are_written_differently():
    values = [
        None, True, 1, 1.0, "1", b"1", -0.0, 0.0, (1,), [1], ((1,),), (1, 2), {"a": 1}, {"a": 2},
        popxl.float32, popxl.float16, np.float32(1), np.int32(1), np.dtype("f4"),
        np.arange(3), np.arange(4), np.arange(3.0), popxl.TensorSpec((1,), popxl.float32),
        popxl.TensorSpec((1,), popxl.float32, (2,)),
    ]  # fmt: skip
    assert len({_attribute_key(v) for v in values}) == len(values)
