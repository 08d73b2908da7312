"""The stored form of remote entries: what TPU needs, tried out on CPU."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest

import popxl
from popxl import ops
from popxl._lower import program
from popxl._lower.layout import Layout
from tests.popxl.programs import f32, store

CASES = [((), popxl.float32), ((5,), popxl.float32), ((3, 7, 50), popxl.float16),
         ((128,), popxl.int8), ((8, 128), popxl.float32), ((2049,), popxl.bfloat16)]  # fmt: skip


def _buffer(shape, dtype) -> popxl.RemoteBuffer:
    with popxl.Ir().main_graph:
        return popxl.remote_buffer(shape, dtype, 2)


@pytest.mark.parametrize(("shape", "dtype"), CASES)
def test_tiled_entries_are_whole_tiles_and_unpack_to_what_was_packed(shape, dtype):
    layout, buffer = Layout(tiled=True), _buffer(shape, dtype)
    rows, lanes = layout.stored_shape(buffer)
    assert lanes == 128
    assert rows % (32 // dtype.itemsize) == 0
    assert rows * lanes >= math.prod(shape)
    value = np.arange(math.prod(shape)).astype(dtype.as_numpy()).reshape(shape)
    stored = layout.pack(value, buffer)
    assert stored.shape == (rows, lanes)
    np.testing.assert_array_equal(layout.unpack(stored, buffer), value)


def test_plain_entries_are_stored_as_they_are():
    layout, buffer = Layout(), _buffer((3, 5), popxl.float32)
    value = f32(3, 5)
    assert layout.stored_shape(buffer) == (3, 5)
    assert layout.pack(value, buffer) is value
    assert layout.unpack(value, buffer) is value


def test_programs_run_the_same_with_tiled_entries(monkeypatch):
    monkeypatch.setattr(program, "Layout", lambda tiled: partial(Layout, tiled=True)())
    ir = popxl.Ir(replication=4)
    with ir.main_graph:
        buffer = popxl.remote_buffer((3, 5), popxl.float32, 3)
        whole = popxl.remote_variable(f32(3, 5), buffer, 1)
        sharded, shard = popxl.replica_sharded_variable(f32(7, seed=1))
        row = popxl.variable(1, popxl.uint32)

        def step(row: popxl.TensorByRef):
            ops.remote_store(buffer, row, ops.remote_load(buffer, row) * 2.0)

        ops.repeat(ir.create_graph(step, row), 3, row)
        ops.remote_store(sharded._remote[0], 0, shard + 1.0)
        gathered = store(ops.collectives.replicated_all_gather(shard))
    with popxl.Session(ir) as session:
        assert session._program.buffer_shape(buffer) == (12, 8, 128)
        np.testing.assert_array_equal(session.run()[gathered][3], f32(7, seed=1))
        np.testing.assert_allclose(session.get_tensor_data(whole), f32(3, 5) * 8, rtol=1e-6)
        session.write_variable_data(whole, f32(3, 5, seed=2))
        session.run()
    np.testing.assert_allclose(session.get_tensor_data(whole), f32(3, 5, seed=2) * 8, rtol=1e-6)
    np.testing.assert_allclose(session.get_tensor_data(sharded), f32(7, seed=1) + 2, rtol=1e-6)
