"""Element types: interned, immutable, converted from and to numpy, Python and torch."""

from __future__ import annotations

import copy

import numpy as np
import pytest

import popxl

ALL = [
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float8_143",
    "float8_152", "float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64",
    "complex64", "complex128",
]  # fmt: skip


@pytest.mark.parametrize("name", ALL)
def test_each_type_is_found_by_name_and_by_its_numpy_type(name):
    dtype = getattr(popxl, name, None) or popxl.dtype.from_name(name)
    assert popxl.dtype.from_name(name) is dtype
    assert popxl.dtype.as_dtype(name) is dtype
    assert popxl.dtype.as_dtype(dtype) is dtype
    assert popxl.dtype.as_dtype(dtype.as_numpy()) is dtype
    assert (dtype.name, repr(dtype)) == (name, f"popxl.dtypes.{name}")
    assert copy.deepcopy(dtype) is dtype
    assert dtype.itemsize == dtype.as_numpy().itemsize
    kind = dtype.as_numpy().kind
    if kind in "biufc":
        facts = (dtype.is_int, dtype.is_floating_point, dtype.is_complex, dtype.is_signed)
        assert facts == (kind in "iu", kind == "f", kind == "c", kind in "ifc")


def test_aliases_are_the_types_themselves():
    assert popxl.half is popxl.float16
    assert popxl.float is popxl.float32
    assert popxl.double is popxl.float64
    assert popxl.dtype.as_dtype(float) is popxl.float32
    assert popxl.dtype.as_dtype(int) is popxl.int64
    assert popxl.dtype.as_dtype(bool) is popxl.bool
    assert popxl.dtype.as_dtype(np.float16) is popxl.float16


def test_float8_is_a_record_of_one_byte_on_the_host():
    for name in ("float8_143", "float8_152"):
        dtype = popxl.dtype.from_name(name)
        assert dtype.as_numpy() == np.dtype([(name, "u1")])
        assert dtype.as_jax().itemsize == 1
        assert dtype.is_floating_point


def test_torch_types_convert_both_ways():
    torch = pytest.importorskip("torch")
    for name in ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int32", "bool"):
        dtype = popxl.dtype.from_name(name)
        assert popxl.dtype.as_dtype(getattr(torch, name)) is dtype
        assert dtype.as_torch() is getattr(torch, name)
    with pytest.raises(ValueError, match="no torch equivalent"):
        popxl.float8_143.as_torch()


def test_the_table_of_torch_types_holds_all_that_have_one_here() -> None:
    """Programs read this private table of PopXL; it is made when it is read."""
    torch = pytest.importorskip("torch")
    theirs = {t for t in vars(torch).values() if isinstance(t, torch.dtype)}
    table = popxl.dtypes._PT_TO_POPXL
    assert table[torch.float8_e4m3fnuz] is popxl.float8_143
    assert table[torch.float8_e5m2fnuz] is popxl.float8_152
    assert table == {t: popxl.dtype.as_dtype(t) for t in theirs if t in table}
    for t in theirs - set(table):
        with pytest.raises(ValueError, match="no popxl dtype"):
            popxl.dtype.as_dtype(t)
    with pytest.raises(AttributeError, match="has no attribute 'float7'"):
        _ = popxl.dtypes.float7


@pytest.mark.parametrize(
    "wrong", ["float128x", object(), np.dtype("U3"), "datetime64[s]", None.__class__]
)
def test_what_is_no_type_is_an_error(wrong):
    with pytest.raises(ValueError, match="no popxl dtype"):
        popxl.dtype.as_dtype(wrong)
    with pytest.raises(ValueError, match="unknown dtype name"):
        popxl.dtype.from_name("float7")


def test_types_cannot_be_made():
    with pytest.raises(TypeError, match="use the constants of popxl"):
        popxl.dtype()
