"""Arguments of other types, sizes and programs: refused by a message that names who takes them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl import ops

F32 = popxl.float32
REPLICAS = 4
NAMED = re.compile(r"^\w+(: | at |\()")
FOREIGN = re.compile(r"has no attribute|not iterable|not supported between|can only concatenate|"
                     r"cannot convert dictionary|interpreted as|converted to a scalar")  # fmt: skip


class Program:
    """A program to write into, and tensors, streams and groups of another."""

    def __init__(self) -> None:
        other = popxl.Ir(replication=2)
        with other.main_graph:
            self.foreign_tensor = popxl.variable(np.ones(2, np.float32), name="weight")
            self.foreign_buffer = popxl.remote_buffer((2,), F32, 2)
            self.foreign_stream = popxl.h2d_stream((2,), F32, "tokens")
            self.foreign_graph = other.create_graph(lambda t: t + 1, self.foreign_tensor)
        self.foreign_group = other.replica_grouping(group_size=1)
        self.ir = popxl.Ir(replication=REPLICAS)

    def x(self, *shape: int, dtype: Any = np.float32) -> popxl.Variable:
        return popxl.variable(np.ones(shape, dtype))

    @property
    def buffer(self) -> popxl.RemoteBuffer:
        return popxl.remote_buffer((2,), F32, 2)

    @property
    def graph(self) -> popxl.Graph:
        spec = popxl.TensorSpec((2,), F32)
        return self.ir.create_graph(lambda t, u: t + u, spec, spec)

    def __call__(self, graph: Any, *inputs: Any, **kwargs: Any) -> Any:
        return ops.call(graph, *inputs, **kwargs)


collect = ops.collectives
REFUSED: dict[str, Callable[[Program], Any]] = {
    "a buffer's name": lambda p: ops.remote_load("weights", 0),
    "another Ir's buffer": lambda p: ops.remote_load(p.foreign_buffer, 0),
    "a fraction of an entry": lambda p: ops.remote_load(p.buffer, 0.5),
    "no entry": lambda p: ops.remote_load(p.buffer, None),
    "an array of entries": lambda p: ops.remote_load(p.buffer, np.array([1])),
    "an entry too far": lambda p: ops.remote_load(p.buffer, 2),
    "an entry before the first": lambda p: ops.remote_store(p.buffer, -1, p.x(2)),
    "an entry of floats": lambda p: ops.remote_load(p.buffer, p.x()),
    "an array that is stored": lambda p: ops.remote_store(p.buffer, 0, np.ones(2)),
    "another shape that is stored": lambda p: ops.remote_store(p.buffer, 0, p.x(3)),
    "another dtype that is stored": lambda p: ops.remote_store(p.buffer, 0, p.x(2, dtype=np.int32)),
    "nothing to load into": lambda p: ops.remote_load_(p.buffer, 0, None),
    "no entries": lambda p: popxl.remote_buffer((2,), F32, 0),
    "a fraction of entries": lambda p: popxl.remote_buffer((2,), F32, 1.5),
    "a number as an entry's shape": lambda p: popxl.remote_buffer(2, F32),
    "a negative size": lambda p: popxl.remote_buffer((-2,), F32),
    "a fraction as a size": lambda p: popxl.remote_buffer((2.5,), F32),
    "a dtype that is none": lambda p: popxl.remote_buffer((2,), "floats"),
    "a number as a stream's shape": lambda p: popxl.h2d_stream(2, F32),
    "a stream of a negative size": lambda p: popxl.d2h_stream((-2,), F32),
    "a stream's dtype before its shape": lambda p: popxl.h2d_stream(F32, (2,)),
    "a load from a stream's name": lambda p: ops.host_load("tokens"),
    "a load from the host's stream": lambda p: ops.host_load(popxl.d2h_stream((2,), F32)),
    "a load from another Ir's stream": lambda p: ops.host_load(p.foreign_stream),
    "a store of an array": lambda p: ops.host_store(popxl.d2h_stream((2,), F32), np.ones(2)),
    "a store of another shape": lambda p: ops.host_store(popxl.d2h_stream((2,), F32), p.x(3)),
    "a store before its stream": lambda p: ops.host_store(p.x(2), popxl.d2h_stream((2,), F32)),
    "a short store of an array": lambda p: addons.host_store(np.ones(2)),
    "a call of a function": lambda p: p(lambda t: t, p.x(2)),
    "a call of a tensor": lambda p: p(p.x(2)),
    "a call of the main graph": lambda p: p(p.ir.main_graph),
    "a call of another Ir's graph": lambda p: p(p.foreign_graph, p.x(2)),
    "a call with another Ir's tensor": lambda p: p(p.graph, p.x(2), p.foreign_tensor),
    "a call with too few": lambda p: p(p.graph, p.x(2)),
    "a call with too many": lambda p: p(p.graph, p.x(2), p.x(2), p.x(2)),
    "a call with another shape": lambda p: p(p.graph, p.x(2), p.x(3)),
    "a call with another dtype": lambda p: p(p.graph, p.x(2), p.x(2, dtype=np.int32)),
    "a call with nothing": lambda p: p(p.graph, p.x(2), None),
    "a call with a text": lambda p: p(p.graph, p.x(2), "x"),
    "a call by names": lambda p: p(p.graph, p.x(2), inputs_dict={"u": p.x(2)}),
    "a call by a list": lambda p: p(p.graph, p.x(2), inputs_dict=[p.x(2)]),
    "a loop of a function": lambda p: ops.repeat(lambda t: t, 2, p.x(2)),
    "a fraction of iterations": lambda p: ops.repeat(p.graph, 2.5, p.x(2), p.x(2)),
    "fewer than no iterations": lambda p: ops.repeat(p.graph, -1, p.x(2), p.x(2)),
    "a branch that is a function": lambda p: ops.conditional(p.x(), lambda: 1, p.graph, [], []),
    "a condition of Python": lambda p: ops.conditional(
        True, p.graph, p.graph, [p.x(2), p.x(2)], [p.x(2), p.x(2)]),
    "a graph of a tensor": lambda p: p.ir.create_graph(p.x(2)),
    "a graph of a class": lambda p: p.ir.create_graph(int, p.x(2)),
    "a graph that returns a number": lambda p: p.ir.create_graph(lambda t: 3, p.x(2)),
    "a graph that returns a dict": lambda p: p.ir.create_graph(lambda t: {"a": t}, p.x(2)),
    "a graph of another Ir's tensor": lambda p: p.ir.create_graph(lambda t: t, p.foreign_tensor),
    "a graph with too many arguments": lambda p: p.ir.create_graph(lambda: None, p.x(2)),
    "an output that is a number": lambda p: p.ir.create_graph(lambda: popxl.graph_output(3)),
    "an output of the main graph": lambda p: popxl.graph_output(p.x(2)),
    "no replicas": lambda p: popxl.Ir(0),
    "a fraction of replicas": lambda p: popxl.Ir(1.5),
    "a text of replicas": lambda p: popxl.Ir("2"),
    "replicas or not": lambda p: popxl.Ir(True),
    "a fraction of transfers": lambda p: setattr(p.ir, "num_host_transfers", 1.5),
    "no transfers": lambda p: setattr(p.ir, "num_host_transfers", 0),
    "groups without a stride": lambda p: p.ir.replica_grouping(stride=0),
    "a fraction of a stride": lambda p: p.ir.replica_grouping(stride=1.5, group_size=2),
    "groups of three": lambda p: p.ir.replica_grouping(group_size=3),
    "groups of a text": lambda p: p.ir.replica_grouping(group_size="2"),
    "an assignment of few": lambda p: p.ir.replica_grouping_from_assignments([0, 1]),
    "an assignment of floats": lambda p: p.ir.replica_grouping_from_assignments([0.0, 0, 1, 1]),
    "a number as an assignment": lambda p: p.ir.replica_grouping_from_assignments(4),
    "a number as a group": lambda p: collect.replicated_all_reduce(p.x(2), group=2),
    "another Ir's group": lambda p: collect.replicated_all_reduce(p.x(2), group=p.foreign_group),
    "an unknown reduction": lambda p: collect.replicated_all_reduce(p.x(2), op="sum"),
    "a gathered array": lambda p: collect.replicated_all_gather(np.ones(2)),
    "a slice of an array": lambda p: collect.replicated_slice(np.ones(4)),
    "a number as a grouping": lambda p: popxl.variable(np.ones(2), replica_grouping=2),
    "another Ir's grouping": lambda p: popxl.variable(
        np.ones((2, 2)), replica_grouping=p.foreign_group),
    "data without groups": lambda p: popxl.variable(
        np.ones(2), replica_grouping=p.ir.replica_grouping(group_size=1)),
    "a text as data": lambda p: popxl.variable("a"),
    "nothing as data": lambda p: popxl.constant(None),
    "a function as data": lambda p: popxl.constant(lambda: 1),
    "rows of two lengths": lambda p: popxl.variable([[1, 2], [3]]),
    "a tensor as data": lambda p: popxl.variable(p.x(2)),
    "an unknown dtype": lambda p: popxl.variable(np.ones(2), "floats"),
    "a number as a name": lambda p: popxl.variable(np.ones(2), name=3),
    "an unknown retrieval": lambda p: popxl.variable(np.ones(2), retrieval_mode="all"),
    "a number as an input's shape": lambda p: popxl.graph_input(2, F32),
    "a remote variable without a buffer": lambda p: popxl.remote_variable(np.ones(2), "weights"),
    "a remote variable of another dtype": lambda p: popxl.remote_variable(
        np.ones(2, np.float16), p.buffer),
    "a remote variable too far": lambda p: popxl.remote_variable(np.ones(2), p.buffer, 5),
    "a remote variable at a tensor": lambda p: popxl.remote_variable(
        np.ones(2), p.buffer, popxl.constant(0)),
    "three shards": lambda p: popxl.replica_sharded_variable(np.ones(6), shard_over=3),
    "a fraction of shards": lambda p: popxl.replica_sharded_variable(np.ones(5), shard_over=2.5),
    "a buffer of a number": lambda p: popxl.replica_sharded_buffer(8, F32),
    "a spec of a number": lambda p: popxl.TensorSpec(2, F32),
    "a session of a graph": lambda p: popxl.Session(p.ir.main_graph),
    "an unknown device": lambda p: popxl.Session(p.ir, "tpx"),
    "a factory of functions": lambda p: addons.VariableFactory([lambda: np.ones(2)], name="w"),
    "a factory of texts": lambda p: addons.VariableFactory(["a"], name="w"),
    "a factory of nothing": lambda p: addons.VariableFactory([], name="w"),
    "a factory of None": lambda p: addons.VariableFactory(None, name="w"),
    "a factory of few shards": lambda p: addons.VariableFactory(
        np.ones(2), name="w", shard_over=0),
    "a factory of another Ir's group": lambda p: addons.VariableFactory(
        np.ones(2), name="w", replica_grouping=p.foreign_group).create_tensor(),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_taken_is_refused_by_name(name: str) -> None:
    program = Program()
    with pytest.raises(Exception) as caught, program.ir.main_graph:
        REFUSED[name](program)
    assert isinstance(caught.value, (TypeError, ValueError)), repr(caught.value)
    message = str(caught.value)
    assert NAMED.match(message), message
    assert not FOREIGN.search(message), message
    assert __file__ in message


def test_the_name_of_a_function_is_not_said_twice() -> None:
    with pytest.raises(ValueError) as caught, popxl.Ir().main_graph:
        popxl.variable(np.ones(2), retrieval_mode="all")
    assert str(caught.value).startswith("variable: unknown retrieval_mode 'all' (")
    with pytest.raises(ValueError) as caught, popxl.Ir().main_graph:
        ops.topk(popxl.variable(np.ones(2)), 3, 0, True, True)
    assert str(caught.value).startswith("topk: k=3 must")
