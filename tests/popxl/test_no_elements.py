"""Tensors, entries and shards of no elements: programs run with them as with any other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import popxl
from popxl import ops
from tests.popxl.programs import store
from tests.slow import slow

pytestmark = pytest.mark.usefixtures("cached", "compiled_quickly")


def _zeros(shape: tuple[int, ...]) -> np.ndarray:
    return np.zeros(shape, np.float32)


def entries(shape: tuple[int, ...], on_disk: int = 0) -> Any:
    buffer = popxl.remote_buffer(shape, popxl.float32, 2)
    buffer.on_disk = on_disk
    popxl.remote_variable(_zeros(shape), buffer, 1)
    ops.remote_store(buffer, 0, ops.remote_load(buffer, 1) + 1.0)
    ir = popxl.gir()
    numbers = np.arange(ir.replication_factor, dtype=np.int32)
    each = popxl.variable(
        numbers if numbers.size > 1 else np.int32(1), replica_grouping=ir.replica_grouping(1, 1)
    )
    own = ops.remote_load(buffer, each)
    ops.remote_store(buffer, each, own + ops.remote_load(buffer, 0))
    return own


def entries_on_disk(shape: tuple[int, ...]) -> Any:
    return entries(shape, on_disk=2)


def shards_in_entries(shape: tuple[int, ...]) -> Any:
    buffer = popxl.replica_sharded_buffer(shape, popxl.float32)
    popxl.remote_replica_sharded_variable(_zeros(shape), buffer)
    ops.remote_store(buffer, 0, ops.remote_load(buffer, 0) + 1.0)
    return ops.collectives.replicated_all_gather(ops.remote_load(buffer, 0))


def shards(shape: tuple[int, ...]) -> Any:
    _, shard = popxl.replica_sharded_variable(_zeros(shape))
    ops.var_updates.copy_var_update_(shard, shard + 1.0)
    return ops.collectives.replicated_all_gather(shard)


def variables_of_groups(shape: tuple[int, ...]) -> Any:
    ir = popxl.gir()
    data = np.zeros((ir.replication_factor, *shape), np.float32)
    if ir.replication_factor == 1:
        data = data[0]
    v = popxl.variable(data, replica_grouping=ir.replica_grouping(1, 1))
    ops.add_(v, popxl.constant(1.0))
    return v


def collectives(shape: tuple[int, ...]) -> Any:
    v = popxl.variable(_zeros(shape))
    shard = ops.collectives.replica_sharded_slice(v)
    scattered = ops.collectives.replicated_reduce_scatter(
        v, configure_output_for_replicated_tensor_sharding=True
    )
    reduced = ops.collectives.replicated_all_reduce(v)
    return ops.collectives.replicated_all_gather(scattered + shard) + reduced


def in_a_loop(shape: tuple[int, ...]) -> Any:
    v = popxl.variable(_zeros(shape))
    return ops.repeat(popxl.gir().create_graph(lambda x: x + 1.0, v), 3, v)[0]


@pytest.mark.parametrize(
    ("shape", "replicas"),
    [((0,), 1), slow((0,), 2), slow((0, 3), 1), ((0, 3), 2), slow((3, 0), 1), ((3, 0), 2)],
)
@pytest.mark.parametrize(
    "make",
    [entries, entries_on_disk, shards_in_entries, shards, variables_of_groups, collectives,
     in_a_loop],
)  # fmt: skip
def test_programs_run(make: Callable[[tuple[int, ...]], Any], shape, replicas, tmp_path):
    ir = popxl.Ir(replication=replicas)
    with ir.main_graph:
        out = store(make(shape))
    options = {"disk": tmp_path} if make is entries_on_disk else {}
    with popxl.Session(ir, **options) as session:
        for _ in range(2):
            assert session.run()[out].shape == ((replicas, *shape) if replicas > 1 else shape)
        session.weights_to_host()
        for variable in ir.main_graph.variables:
            found = session.get_tensor_data(variable)
            assert found.shape == variable.shape_on_host
        session.write_variable_data(variable, found)


def test_what_is_changed_is_a_copy_of_what_is_still_needed():
    """A loop changes its copy of a loaded entry, which is read afterwards."""
    buffer_shape = (0, 2)
    ir = popxl.Ir()
    with ir.main_graph:
        buffer = popxl.remote_buffer(buffer_shape, popxl.float32, 2)
        entry = ops.remote_load(buffer, 0)

        def body(x: popxl.Tensor) -> popxl.Tensor:
            x = x + 1.0
            ops.remote_store(buffer, 1, x)
            return x

        (changed,) = ops.repeat(ir.create_graph(body, entry), 3, entry)
        outs = store(changed), store(entry), store(ops.remote_load(buffer, 0))
    with popxl.Session(ir) as session:
        for _ in range(2):
            found = session.run()
            assert all(found[out].shape == buffer_shape for out in outs)
