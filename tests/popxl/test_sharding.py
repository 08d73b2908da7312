"""How a tensor is cut over replicas, and what knows it."""

from __future__ import annotations

import numpy as np
import pytest

import popxl
from popxl import ops
from popxl._ir.sharding import MetaShape, common_meta_shape, shard_count, shard_elements

pytestmark = pytest.mark.usefixtures("cached", "compiled_quickly")


def test_the_number_of_shards_goes_with_the_shape_of_the_whole():
    ir = popxl.Ir(6)
    with ir.main_graph:
        buffer = popxl.replica_sharded_buffer((4,), popxl.float32, shard_over=3)
        shard = ops.remote_load(buffer, 0)
        spec = popxl.TensorSpec(shard.shape, shard.dtype, shard.meta_shape)
        graph = ir.create_graph(lambda t: t * 2.0, spec)
        again = ops.init(shard.shape, shard.dtype, meta_shape=shard.meta_shape)
        plain = popxl.remote_buffer(shard.shape, shard.dtype)
        plain.meta_shape = shard.meta_shape
    for meta in (shard.meta_shape, graph.outputs[0].meta_shape, again.meta_shape, plain.meta_shape):
        assert (meta, meta.shards) == ((4,), 3)


@pytest.mark.parametrize(
    ("whole", "elements", "group", "shards"),
    [((8,), 2, 4, 4), ((8,), 4, 4, 2), ((8,), 8, 4, 1), ((2,), 1, 4, 4), ((5, 3), 2, 8, 8)],
)
def test_a_shape_alone_means_a_shard_for_each_replica_or_the_only_number_that_fits(
    whole, elements, group, shards
):
    assert shard_count(whole, elements, group) == shards


def test_a_number_that_is_known_decides_and_one_that_cannot_be_is_refused():
    assert shard_count(MetaShape((2,), 2), 1, 4) == 2
    with pytest.raises(
        ValueError, match="4 shards, a number that does not divide groups of 2 replicas"
    ):
        shard_count(MetaShape((8,), 4), 2, 2)
    with pytest.raises(ValueError, match=r"none of \[1, 2, 4\] shards have 3 elements"):
        shard_count((8,), 3, 4)
    with pytest.raises(ValueError, match=r"\[2, 3\] shards all have 2 elements"):
        shard_count((4,), 2, 6)


def test_what_tensors_have_in_common():
    known, alone = MetaShape((4,), 3), MetaShape((4,))
    assert common_meta_shape([alone, known]).shards == 3
    assert common_meta_shape([alone, (), alone]) == (4,)
    assert common_meta_shape([known, MetaShape((4,), 2)]) == ()
    assert common_meta_shape([known, MetaShape((2, 2), 3)]) == ()
    assert shard_elements((5, 3), 8) == 2


@pytest.mark.parametrize("dtype", ["float8_143", "float8_152"])
@pytest.mark.parametrize("structured", [False, True])
@pytest.mark.parametrize("kind", ["variable", "remote", "sharded", "remote sharded"])
def test_variables_of_float8_are_made_of_numbers_or_of_float8(kind, structured, dtype):
    kind_of, shape = popxl.dtype.from_name(dtype), [3, 2]
    numbers = np.arange(6, dtype=np.float32).reshape(shape) - 2
    stored = popxl.fp8_utils.host_pow2scale_cast_to_fp8(numbers, kind_of, 2)
    data = stored if structured else numbers
    options = {"dtype": kind_of} | ({} if structured else {"log2_scale": 2})
    ir = popxl.Ir(2)
    with ir.main_graph:
        if kind == "variable":
            v = x = popxl.variable(data, **options)
        elif kind == "remote":
            buffer = popxl.RemoteBuffer(shape, kind_of, 1)
            v, x = popxl.remote_variable(data, buffer, **options), ops.remote_load(buffer, 0)
        elif kind == "sharded":
            v, x = popxl.replica_sharded_variable(data, **options)
        else:
            buffer = popxl.replica_sharded_buffer(shape, kind_of)
            v = popxl.remote_replica_sharded_variable(data, buffer, **options)
            x = ops.remote_load(buffer, 0)
        if x.meta_shape:
            x = ops.collectives.replicated_all_gather(x)
        y = ops.pow2scale_cast_from_fp8(x, popxl.constant(-2, popxl.int32), popxl.float32)
        stream = popxl.d2h_stream(y.shape, y.dtype)
        ops.host_store(stream, y)
    with popxl.Session(ir) as session:
        np.testing.assert_array_equal(session.run()[stream], np.stack([numbers] * 2))
        assert session.get_tensor_data(v).dtype == stored.dtype
        np.testing.assert_array_equal(session.get_tensor_data(v), stored)
        session.write_variable_data(v, stored[::-1].copy())
        np.testing.assert_array_equal(session.run()[stream][1], numbers[::-1])
