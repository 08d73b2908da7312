"""Whole numbers that a dtype lacks are refused wherever data enters; none wraps around."""

from __future__ import annotations

import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.errors import SpecError

from .integers import INTEGERS, extremes
from .programs import f32, graph_of, run

REFUSED = r"(?s)(does not fit|out of bounds)"
PAST = [
    (popxl.int32, 2**31),
    (popxl.int32, [[1, 2**40]]),
    (popxl.int32, np.int64(2**40 + 5)),
    (popxl.uint8, 300),
    (popxl.uint32, [-1]),
    (popxl.uint32, np.uint64(2**33)),
    (popxl.int8, np.int32(-129)),
    (popxl.int16, 3e9),
    (popxl.int32, float("nan")),
    (popxl.int32, float("inf")),
]


@pytest.mark.parametrize(("dtype", "data"), PAST)
@pytest.mark.parametrize("make", [popxl.constant, popxl.variable])
def test_tensors_are_not_made_of_numbers_that_their_dtype_lacks(make, dtype, data):
    with popxl.Ir().main_graph, pytest.raises(ValueError, match=REFUSED):
        make(data, dtype)


@pytest.mark.parametrize("data", [2**31, [2**40], np.uint64(2**32), np.int64(-(2**31) - 1)])
def test_data_is_not_narrowed_to_numbers_that_32_bits_lack(data):
    with popxl.Ir().main_graph, pytest.raises(ValueError, match=REFUSED):
        popxl.constant(data)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_the_ends_of_a_type_fit(dtype):
    numbers = extremes(dtype)
    with popxl.Ir().main_graph:
        found = popxl.constant(numbers, dtype)._data
        assert popxl.constant(np.zeros((0, 2)), dtype).shape == (0, 2)
    assert found.tolist() == numbers


def _session(dtype: popxl.dtype):
    """A session that adds what it loads to a variable, with both."""
    ir = popxl.Ir()
    with ir.main_graph:
        source, x = popxl.h2d_stream((), dtype, "x"), popxl.variable(0, dtype, "v")
        ops.var_updates.copy_var_update_(x, ops.host_load(source))
    return popxl.Session(ir), source, x


@pytest.mark.parametrize(
    ("dtype", "data"),
    [(popxl.int32, 2**40 + 5), (popxl.int32, np.int64(2**31)), (popxl.uint8, 300),
     (popxl.uint32, -1)],
)  # fmt: skip
def test_feeds_and_written_variables_are_checked_by_name(dtype, data):
    session, source, var = _session(dtype)
    with session:
        with pytest.raises(ValueError, match=f"input 'x': {int(data)} does not fit"):
            session.run({source: data})
        with pytest.raises(ValueError, match=f"variable 'v': {int(data)} does not fit"):
            session.write_variable_data(var, data)
        assert session.get_tensor_data(var) == 0
    session.write_variables_data({var: lambda: data})
    with pytest.raises(ValueError, match=f"variable 'v': {int(data)} does not fit"), session:
        pass


@pytest.mark.parametrize("number", [2**40, -(2**40), 2**31 + 5])
def test_a_whole_number_reaches_floats_and_unsigned_numbers_whole(number):
    (y,) = run(lambda x: x + number, np.zeros(1, np.float32))
    assert y == np.float32(number)
    session, source, var = _session(popxl.uint32 if 0 < number < 2**32 else popxl.float32)
    with session:
        session.run({source: number})
        assert session.get_tensor_data(var) == var.dtype.as_numpy().type(number)


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x + 2**40,
        lambda x: 2**31 - x,
        lambda x: x**3e9,
        lambda x: x[np.array([2**32])],
        lambda x: ops.call(graph_of(lambda y: y + 1, x[0]), 2**31),
        lambda x: ops.clip(x, max=2**40),
        lambda x: ops.increment_mod(x, 1, 2**31),
        lambda x: ops.scaled_add(x, x, a=2.0**40),
    ],
)
def test_numbers_beside_tensors_are_checked(use):
    ir = popxl.Ir()
    with ir.main_graph, pytest.raises((ValueError, TypeError, IndexError, SpecError)) as caught:
        use(popxl.variable([1, 2], popxl.int32))
    words = ("does not fit", "data of int32", "bounds", "is out of range")
    assert any(word in str(caught.value) for word in words)


def test_floats_may_overflow_to_infinity_as_on_any_processor():
    with pytest.warns(RuntimeWarning, match="overflow"):
        (y,) = run(lambda x: x + 1e6, f32(1).astype(np.float16))
    assert np.isinf(y)
