"""Data types of tensors.

A `dtype` is an interned, immutable record. Names, aliases and conversions follow PopXL.
float8 values are structured one-byte records on the host (`np_dtype_float8_143`,
`np_dtype_float8_152`: PopXL's host format) and `float8_e4m3fnuz` / `float8_e5m2fnuz` on the device:
the formats with bias 8 / 16, no infinity and 0x80 as NaN.

`float8_e4m3fn` and `float8_e5m2` are other formats, beyond PopXL: those of the matrix units of
NVIDIA GPUs (Micikevicius et al., arXiv:2209.05433), with bias 7 / 15 and torch's names. They are
the same on host and device. `popxl.ops.fp8` makes them; no other arithmetic takes them.
"""

from __future__ import annotations

import builtins
from typing import Any

import ml_dtypes
import numpy as np

np_dtype_float8_143 = np.dtype([("float8_143", "u1")])
np_dtype_float8_152 = np.dtype([("float8_152", "u1")])

_BY_NAME: dict[str, dtype] = {}
_NP_TO_POPXL: dict[np.dtype, dtype] = {}
_PY_TO_POPXL: dict[Any, dtype] = {}
_BY_TORCH_NAME: dict[str, dtype] = {}


class dtype:  # noqa: N801 - PopXL's name
    """Element type of a tensor; use popxl's constants (`popxl.float32`, ...)."""

    _name: str
    _kind: str
    _host: np.dtype
    _device: np.dtype

    def __init__(self) -> None:
        raise TypeError(
            f"Cannot create {type(self).__module__}.{type(self).__qualname__} instances; use the "
            "constants of popxl, such as popxl.float32, or dtype.as_dtype(...)"
        )

    @property
    def name(self) -> str:
        """Name of the element type, such as "float32"."""
        return self._name

    @property
    def is_complex(self) -> builtins.bool:
        return self._kind == "c"

    @property
    def is_int(self) -> builtins.bool:
        return self._kind in "iu"

    @property
    def is_floating_point(self) -> builtins.bool:
        return self._kind == "f"

    @property
    def is_signed(self) -> builtins.bool:
        return self._kind in "ifc"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self._device.itemsize

    @property
    def largest(self) -> builtins.float:
        """Largest finite number of a floating-point type."""
        return builtins.float(ml_dtypes.finfo(self._device).max)

    @classmethod
    def from_name(cls, name: str) -> dtype:
        """Returns the dtype called `name`; raises ValueError if there is none."""
        if name not in _BY_NAME:
            raise ValueError(f"unknown dtype name {name!r}: use one of {', '.join(_BY_NAME)}")
        return _BY_NAME[name]

    @classmethod
    def as_dtype(cls, type_value: Any) -> dtype:
        """Converts a popxl, numpy, Python or torch type, or a name, to a popxl dtype.

        Raises:
            ValueError: if there is no corresponding popxl dtype.
        """
        if isinstance(type_value, dtype):
            return type_value
        if type_value is None:  # which numpy takes for float64
            raise ValueError("there is no popxl dtype for None: use one such as popxl.float32")
        if isinstance(type_value, str) and type_value in _BY_NAME:
            return _BY_NAME[type_value]
        if isinstance(type_value, type) and type_value in _PY_TO_POPXL:
            return _PY_TO_POPXL[type_value]
        if type(type_value).__module__ == "torch":
            converted = _BY_TORCH_NAME.get(str(type_value))
            if converted is not None:
                return converted
        try:
            return _NP_TO_POPXL[np.dtype(type_value)]
        except (TypeError, KeyError):
            raise ValueError(
                f"there is no popxl dtype for {type_value!r}: use one such as popxl.float32"
            ) from None

    def as_numpy(self) -> np.dtype:
        """Returns the numpy dtype in which the host holds data of this type."""
        return self._host

    def as_torch(self) -> Any:
        """Returns the torch dtype; raises ValueError for types that torch lacks."""
        import torch

        torch_dtype = getattr(torch, self._name, None)
        if torch_dtype is None:
            raise ValueError(f"{self!r} has no torch equivalent")
        return torch_dtype

    def as_jax(self) -> np.dtype:
        """Returns the numpy or ml_dtypes dtype of device arrays of this type."""
        return self._device

    def __repr__(self) -> str:
        return f"popxl.dtypes.{self._name}"

    def __hash__(self) -> int:
        return hash(self._name)

    def __reduce__(self) -> tuple[Any, ...]:
        return dtype.from_name, (self._name,)

    def __deepcopy__(self, memo: Any) -> dtype:
        return self


def _define_dtype(name: str, kind: str, host: Any, device: Any = None, python: Any = None) -> dtype:
    self = object.__new__(dtype)
    self._name, self._kind = name, kind
    self._host = np.dtype(host)
    self._device = np.dtype(host if device is None else device)
    _BY_NAME[name] = self
    _NP_TO_POPXL[self._host] = self
    _NP_TO_POPXL[self._device] = self
    _BY_TORCH_NAME[f"torch.{name}"] = self
    if python is not None:
        _PY_TO_POPXL[python] = self
    return self


bool = _define_dtype("bool", "b", np.bool_, python=builtins.bool)
int8 = _define_dtype("int8", "i", np.int8)
int16 = _define_dtype("int16", "i", np.int16)
int32 = _define_dtype("int32", "i", np.int32)
int64 = _define_dtype("int64", "i", np.int64, python=int)
uint8 = _define_dtype("uint8", "u", np.uint8)
uint16 = _define_dtype("uint16", "u", np.uint16)
uint32 = _define_dtype("uint32", "u", np.uint32)
uint64 = _define_dtype("uint64", "u", np.uint64)
float8_143 = _define_dtype("float8_143", "f", np_dtype_float8_143, ml_dtypes.float8_e4m3fnuz)
float8_152 = _define_dtype("float8_152", "f", np_dtype_float8_152, ml_dtypes.float8_e5m2fnuz)
float8_e4m3fn = _define_dtype(
    "float8_e4m3fn", "f", ml_dtypes.float8_e4m3fn
)  # largest: 448; no infinity
float8_e5m2 = _define_dtype("float8_e5m2", "f", ml_dtypes.float8_e5m2)  # largest finite: 57344
float16 = _define_dtype("float16", "f", np.float16)
bfloat16 = _define_dtype(
    "bfloat16", "f", ml_dtypes.bfloat16
)  # beyond PopXL: what GPUs and TPUs train in
float32 = _define_dtype("float32", "f", np.float32, python=builtins.float)
float64 = _define_dtype("float64", "f", np.float64)
complex64 = _define_dtype("complex64", "c", np.complex64)
complex128 = _define_dtype("complex128", "c", np.complex128)
_BY_TORCH_NAME.update({"torch.float8_e4m3fnuz": float8_143, "torch.float8_e5m2fnuz": float8_152})
_BY_NAME.update(half=float16, float=float32, double=float64)

half = float16
float = float32
double = float64


def __getattr__(name: str) -> Any:
    """Returns `_PT_TO_POPXL` (torch dtype -> dtype), created on use since it imports torch."""
    if name != "_PT_TO_POPXL":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import torch

    named = ((text.removeprefix("torch."), it) for text, it in _BY_TORCH_NAME.items())
    return {getattr(torch, name): it for name, it in named if hasattr(torch, name)}
