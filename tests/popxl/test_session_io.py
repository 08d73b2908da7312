"""Host arrays of a run: layouts, dtypes, and what is refused."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import popxl
from popxl import ops
from tests.popxl.programs import f32

pytestmark = pytest.mark.usefixtures("compiled_quickly")

SHAPE = (3, 2)


def _doubling(replicas: int, transfers: int, shape=SHAPE, dtype=popxl.float32):
    """A session that doubles each transfer of its input, and its two streams."""
    ir = popxl.Ir(replication=replicas)
    ir.num_host_transfers = transfers
    with ir.main_graph:
        source, target = popxl.h2d_stream(shape, dtype, "x"), popxl.d2h_stream(shape, dtype, "y")

        def step():
            ops.host_store(target, ops.host_load(source) * 2)

        ops.repeat(ir.create_graph(step), transfers)
    return popxl.Session(ir), source, target


LAYOUTS = [
    # replicas, transfers, leading shapes that are accepted
    (1, 1, [(), (1,), (1, 1)]),
    (4, 1, [(4,), (1, 4)]),
    (1, 3, [(3,), (3, 1)]),
    (4, 3, [(3, 4)]),
    (2, 2, [(2, 2)]),
]


@pytest.mark.parametrize(("replicas", "transfers", "accepted"), LAYOUTS)
def test_leading_dimensions_equal_to_1_are_optional(replicas, transfers, accepted):
    session, source, target = _doubling(replicas, transfers)
    leading = [n for n in (transfers, replicas) if n > 1]
    with session:
        for dims in accepted:
            data = f32(*dims, *SHAPE)
            found = session.run({source: data})[target]
            assert found.shape == (*leading, *SHAPE)
            np.testing.assert_array_equal(found, 2 * data.reshape(found.shape))
            assert session.expected_inputs() == [source]


@pytest.mark.parametrize(
    ("replicas", "transfers", "refused"),
    [
        (1, 1, [(3,), (2, 3, 2, 1), (1, 1, 1, 3, 2)]),
        (4, 1, [SHAPE, (3, *SHAPE), (4, 1, *SHAPE)]),
        (1, 3, [SHAPE, (2, *SHAPE), (3, 2, *SHAPE), (1, 3, *SHAPE), (5, *SHAPE), (4, 1, *SHAPE)]),
        (4, 3, [(4, 3, *SHAPE), (12, *SHAPE), (2, 4, *SHAPE), (3, 4, 6), (5, 4, *SHAPE)]),
    ],
)
def test_other_shapes_are_refused_with_the_one_that_is_needed(replicas, transfers, refused):
    session, source, _ = _doubling(replicas, transfers)
    with session:
        for shape in refused:
            needed = rf"'x' has shape .*\({transfers}, {replicas}, 3, 2\)"
            with pytest.raises(ValueError, match=needed):
                session.run({source: np.zeros(shape, np.float32)})


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("given", [(), (1,), (1, 1, 1)])
def test_one_element_may_have_any_shape(shape, given):
    session, source, target = _doubling(1, 1, shape)
    with session:
        found = session.run({source: np.full(given, 3, np.float32)})[target]
        assert (found.shape, found.item()) == (shape, 6)
        with pytest.raises(ValueError, match="is needed"):
            session.run({source: np.ones((2,), np.float32)})


@pytest.mark.parametrize(("replicas", "transfers"), [(2, 1), (1, 3), (2, 3)])
def test_one_element_in_each_transfer_may_have_any_shape(replicas, transfers):
    session, source, target = _doubling(replicas, transfers, (1,))
    sizes = [n for n in (transfers, replicas) if n > 1]
    with session:
        for given in (sizes, [*sizes, 1], [1, *sizes, 1, 1]):
            data = f32(*given)
            found = session.run({source: data})[target]
            np.testing.assert_array_equal(found, 2 * data.reshape(*sizes, 1))
        with pytest.raises(ValueError, match="is needed"):
            session.run({source: f32(*[n + 1 for n in sizes])})


def test_missing_and_unexpected_inputs_are_refused_by_name():
    session, source, _ = _doubling(1, 1)
    with session.ir.main_graph:
        other = popxl.h2d_stream(SHAPE, popxl.float32, "unused")
    data = f32(*SHAPE)
    with session:
        with pytest.raises(ValueError, match=r"missing inputs \['x'\]"):
            session.run()
        with pytest.raises(ValueError, match=r"unexpected inputs \['unused'\]"):
            session.run({source: data, other: data})
        for inputs in ({source: data, "x": data}, {"x": data}):
            with pytest.raises(ValueError, match="by stream, not by name as 'x': use as the key"):
                session.run(inputs)


def test_a_program_without_inputs_takes_none():
    ir = popxl.Ir()
    with ir.main_graph:
        ops.add_(popxl.variable(1.0), popxl.constant(1.0))
    with popxl.Session(ir) as session:
        assert session.run() == {}
        assert session.run({}) == {}


# ---- dtypes -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("dtype", "data"),
    [
        (popxl.float32, np.arange(3, dtype=np.float64)),
        (popxl.float16, [0.0, 1.0, 2.0]),
        (popxl.float32, [0, 1, 2]),
        (popxl.int32, np.arange(3)),
        (popxl.uint32, [0, 1, 2]),
    ],
)
def test_64_bit_arrays_and_python_numbers_are_converted(dtype, data):
    session, source, target = _doubling(1, 1, (3,), dtype)
    with session:
        found = session.run({source: data})[target]
    assert found.dtype == dtype.as_numpy()
    assert found.tolist() == [0, 2, 4]


@pytest.mark.parametrize(
    ("dtype", "data"),
    [
        (popxl.int32, np.zeros(3, np.float32)),
        (popxl.uint32, np.zeros(3, np.int32)),
        (popxl.float16, np.zeros(3, np.float32)),
        (popxl.int32, [0.5, 1, 2]),
    ],
)
def test_data_of_another_dtype_is_refused(dtype, data):
    session, source, _ = _doubling(1, 1, (3,), dtype)
    with session, pytest.raises(ValueError, match="'x' has dtype .* but the stream is popxl"):
        session.run({source: data})


def test_64_bit_data_is_refused_when_asked():
    session, source, target = _doubling(1, 1, (3,))
    data = np.arange(3, dtype=np.float64)
    with session:
        assert session.run({source: data})[target].tolist() == [0, 2, 4]
        with pytest.raises(ValueError, match="float64"):
            session.run({source: data}, downcast_inputs=False)


def test_torch_tensors_are_inputs():
    torch = pytest.importorskip("torch")
    session, source, target = _doubling(1, 1, (3,))
    with session:
        assert session.run({source: torch.arange(3.0)})[target].tolist() == [0, 2, 4]


def test_float8_goes_in_and_comes_out_as_records():
    ir = popxl.Ir()
    with ir.main_graph:
        source = popxl.h2d_stream((4,), popxl.float8_143)
        target = popxl.d2h_stream((4,), popxl.float8_143)
        ops.host_store(target, ops.host_load(source))
    data = np.array([0x00, 0x38, 0x80, 0x7F], np.uint8).view(popxl.float8_143.as_numpy())
    with popxl.Session(ir) as session:
        found = session.run({source: data})[target]
    assert found.dtype == data.dtype
    assert found["float8_143"].tolist() == data["float8_143"].tolist()


# ---- outputs ------------------------------------------------------------------------------------
def test_results_can_be_written_into_given_arrays():
    session, source, target = _doubling(2, 3)
    data = f32(3, 2, *SHAPE)
    outputs = session.create_host_outputs()
    assert [a.shape for a in outputs.values()] == [(3, 2, *SHAPE)]
    with session:
        assert session.run_with_outputs({source: data}, outputs) is None
        np.testing.assert_array_equal(outputs[target], 2 * data)
        wrong_dtype = {target: outputs[target].astype(np.float16)}
        wrong_shape = {target: outputs[target][:2]}
        for wrong in (wrong_dtype, wrong_shape):
            with pytest.raises(ValueError, match="array for output stream 'y' is"):
                session.run_with_outputs({source: data}, wrong)
        with pytest.raises(ValueError, match="no array for the output stream 'y'"):
            session.run_with_outputs({source: data})


def test_a_refused_run_changes_nothing():
    ir = popxl.Ir()
    with ir.main_graph:
        v = popxl.variable(0.0)
        source = popxl.h2d_stream((), popxl.float32)
        ops.add_(v, ops.host_load(source))
    with popxl.Session(ir) as session:
        with pytest.raises(ValueError, match="missing"):
            session.run()
        session.run({source: 2.0})
        assert session.get_tensor_data(v) == 2.0


# ---- streams ------------------------------------------------------------------------------------
def test_a_stream_is_one_queue_for_all_its_loads():
    ir = popxl.Ir()
    ir.num_host_transfers = 4
    with ir.main_graph:
        source, target = popxl.h2d_stream((), popxl.float32), popxl.d2h_stream((), popxl.float32)
        graph = ir.create_graph(lambda: ops.host_load(source))
        first = ops.host_load(source)
        (second,) = ops.call(graph)
        third, fourth = ops.host_load(source), ops.call(graph)[0]
        for t in (first, second, third, fourth):
            ops.host_store(target, t * 10)
    with popxl.Session(ir) as session:
        found = session.run({source: np.arange(4, dtype=np.float32)})[target]
        assert found.tolist() == [0, 10, 20, 30]
        again = session.run({source: np.arange(4, 8, dtype=np.float32)})[target]
        assert again.tolist() == [40, 50, 60, 70]


def test_transfers_that_the_program_does_not_use_are_zeros_or_ignored():
    ir = popxl.Ir()
    ir.num_host_transfers = 3
    with ir.main_graph:
        source, target = popxl.h2d_stream((), popxl.float32), popxl.d2h_stream((), popxl.float32)
        ops.host_store(target, ops.host_load(source))
    with popxl.Session(ir) as session:
        found = session.run({source: np.array([5, 6, 7], np.float32)})[target]
        assert found.tolist() == [5, 0, 0]


@pytest.mark.parametrize(("count", "fits"), [(2, True), (3, False)])
def test_more_transfers_than_announced_are_an_error_that_says_how_many(count, fits):
    ir = popxl.Ir()
    ir.num_host_transfers = 4
    with ir.main_graph:
        source = popxl.h2d_stream((), popxl.float32, "batches")
        cond = popxl.variable(True)
        once = ir.create_graph(lambda: ops.host_load(source))
        twice = ir.create_graph(lambda: ops.host_load(source) + ops.host_load(source))
        branches = ir.create_graph(lambda c: ops.conditional(c, once, twice), cond)
        # The branch that loads more often counts.
        ops.repeat(ir.create_graph(lambda c: [ops.call(branches, c), c][1:], cond), count, cond)
    if fits:
        popxl.Session(ir)
        return
    with pytest.raises(popxl.errors.popart_exception, match=r"'batches' is used 6 times .* to 6"):
        popxl.Session(ir)


def test_stream_names_are_unique_and_wrong_values_are_refused():
    ir = popxl.Ir()
    with ir.main_graph:
        names = [popxl.h2d_stream((2,), popxl.float32, "x").tensor_id for _ in range(2)]
        assert names == ["x", "x__t0"]
        target = popxl.d2h_stream((2,), popxl.float32, "y")
        wide = popxl.variable(np.ones(3, np.float32), name="wide")
        with pytest.raises(ValueError, match=r"'wide' is float32\[3\], but the stream 'y' takes"):
            ops.host_store(target, wide)
    with popxl.Ir().main_graph, pytest.raises(ValueError, match="belongs to another Ir"):
        ops.host_store(target, popxl.variable(np.ones(2, np.float32)))
    assert ir.get_all_d2h_streams() == set()
    with pytest.raises(ValueError, match="num_host_transfers must be at least 1"):
        ir.num_host_transfers = 0


def test_streams_have_a_direction():
    with popxl.Ir().main_graph:
        given, result = popxl.h2d_stream((), popxl.float32), popxl.d2h_stream((), popxl.float32)
        with pytest.raises(TypeError, match="host_load .*HostToDeviceStream, but got DeviceTo"):
            ops.host_load(result)
        with pytest.raises(TypeError, match="host_store .*DeviceToHostStream, but got HostTo"):
            ops.host_store(given, ops.host_load(given))


def test_a_run_waits_once_for_all_its_inputs(monkeypatch):
    """And for nothing else that it sends: on a GPU each wait takes as long as a transfer."""
    ir = popxl.Ir()
    with ir.main_graph:
        sources = [popxl.h2d_stream((2,), popxl.float32) for _ in range(5)]
        for source in sources:
            ops.host_store(popxl.d2h_stream((2,), popxl.float32), ops.host_load(source))
    session, waits = popxl.Session(ir, "cpu"), []
    inputs = {source: np.ones(2, np.float32) for source in sources}
    kind, wait = type(jax.numpy.zeros(1)), jax.block_until_ready
    one = kind.block_until_ready
    with session:
        session.run(inputs)  # what programs need once
        monkeypatch.setattr(jax, "block_until_ready", lambda x: waits.append(x) or wait(x))
        monkeypatch.setattr(kind, "block_until_ready", lambda x: waits.append(x) or one(x))
        found = session.run(inputs)
    assert len(waits) <= 2, "jax.block_until_ready of several asks none of them"
    assert all(array.tolist() == [1, 1] for array in found.values())
