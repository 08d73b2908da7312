"""Behaviour that programs rely on and that no signature shows, where no other file tests it."""

from __future__ import annotations

import numpy as np
import pytest

import popart
import popxl
from popxl import ops
from popxl.transforms.autodiff import ExpectedConnectionType


def _groupwise(replicas: int, stride: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Sums over each replica's group, by the program and by numpy."""
    ir = popxl.Ir(replication=replicas)
    values = np.random.default_rng(0).integers(0, 100, (replicas, 3)).astype(np.float32)
    group = ir.replica_grouping(stride, size)
    with ir.main_graph:
        own = popxl.variable(values, replica_grouping=ir.replica_grouping(1, 1))
        out = popxl.d2h_stream((3,), popxl.float32)
        ops.host_store(out, ops.collectives.replicated_all_reduce(own, group=group))
    expected = np.empty_like(values)
    for start in range(0, replicas, stride * size):
        block = values[start : start + stride * size].reshape(size, stride, 3)
        expected[start : start + stride * size] = np.tile(block.sum(0), (size, 1))
    with popxl.Session(ir) as session:
        return session.run()[out], expected


@pytest.mark.parametrize(
    ("replicas", "stride", "size"), [(16, 1, 16), (16, 1, 4), (16, 4, 4), (16, 2, 4), (256, 16, 16)]
)
def test_collectives_of_many_replicas_on_one_host(replicas, stride, size):
    found, expected = _groupwise(replicas, stride, size)
    np.testing.assert_array_equal(found, expected)


def test_autodiff_s_defaults_are_the_inputs_and_outputs_of_the_moment():
    """A second call has more outputs to start from: the values that the first one exposed."""
    ir = popxl.Ir()
    spec = popxl.TensorSpec((2,), popxl.float32)
    with ir.main_graph:
        graph = ir.create_graph(lambda x, w: ops.sum(ops.exp(x) * w), spec, spec)

        def provided(info: popxl.transforms.GradGraphInfo) -> list[popxl.Tensor]:
            kind = ExpectedConnectionType.FwdGrad
            return [c.fwd_tensor for c in info.expected_inputs if c.connection_type is kind]

        before = graph.outputs
        first = popxl.transforms.autodiff(graph)
        after = graph.outputs
        second = popxl.transforms.autodiff(graph)
    assert provided(first) == list(before)
    assert len(after) > len(before)
    assert provided(second) == list(after)
    for info in (first, second):
        assert [c.fwd_tensor for c in info.expected_outputs] == list(graph.inputs)


def test_names_with_an_underscore_that_applications_use():
    ir = popxl.Ir(replication=4)
    assert ir.main_graph._ir is ir
    session = popxl.Session(ir)
    assert session._full_input_shape((5, 6)) == (4, 5, 6)
    ir.num_host_transfers = 3
    assert session._full_input_shape((5, 6)) == (3, 4, 5, 6)
    assert isinstance(popart.DeviceInfo, type)  # for annotations


def test_minus_and_times_with_equals_rebind_the_name():
    ir = popxl.Ir()
    with ir.main_graph:
        x = popxl.variable(np.float32([1, 2]), name="x")
        y = popxl.variable(np.float32([1, 2]), name="y")
        same, other = x, y
        same += 1.0
        other -= 1.0
        assert same is not y
        assert other is not y
        out = popxl.d2h_stream((2,), popxl.float32)
        ops.host_store(out, other)
    with popxl.Session(ir) as session:
        assert session.run()[out].tolist() == [0, 1]
    assert x._data.tolist() == [2, 3]
    assert y._data.tolist() == [1, 2]
