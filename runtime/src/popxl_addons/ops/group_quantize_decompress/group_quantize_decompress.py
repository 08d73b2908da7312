"""Group quantization to 4 or 8 bits: adjacent values share a scale and a bias.

A group of values x is stored as integers q in 0..15 or 0..255 with x ≈ q * scale + bias. Four or
two integers share a uint16, the first in its highest bits.

Scale and bias are of one of two types:
- float16, in which all arithmetic is then, too. Scales below 6e-5 have fewer digits, and numbers
  below 3e-8 are 0.
- bfloat16, with arithmetic in float32, for numbers of any size. Biases are rounded down and scales
  up, so that each value is off by half a scale at most. With n + 1 integers, a scale is at most
  (1 + 1/128) (highest - lowest + |lowest| / 128) / n.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

import popxl
from popxl import TensorSpec
from popxl._ir.op_registry import NoGrad, define
from popxl.ops._emit import emit
from popxl.ops._numerics import round_to_narrow_float, upcast_half_types
from popxl.ops.placement import materialize_array

__all__ = [
    "group_quantize_compress_numpy",
    "group_quantize_decompress",
    "group_quantize_decompress_numpy",
]

_WORD = 16


def _bit_shifts(bits: int) -> np.ndarray:
    """Bit shifts of the quantized values in a packed word; the first is in the highest bits."""
    if bits not in (4, 8):
        raise ValueError(f"values have 4 or 8 bits, not {bits}")
    return np.arange(_WORD - bits, -1, -bits, dtype=np.uint16)


def group_quantize_compress_numpy(
    t: np.ndarray, group_size: int, dim: int = -1, bits: int = 4, dtype: Any = np.float16
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Quantize a float array on the host to packed words, scales and biases.

    Args:
        t: array of n axes.
        group_size: values in a group, a multiple of those in a word that divides the length of
            axis `dim`.
        dim: axis along which neighbours form groups.
        bits: of a value, 4 or 8.
        dtype: of scale and bias, float16 or bfloat16.

    Returns:
        Packed uint16, and scale and bias. Their axes are those of `t`, with `dim` moved to the end
        and cut in two: (..., groups, group_size * bits / 16), and (..., groups, 1) for scale and
        bias.

    Raises:
        ValueError: the group size does not fit; an element is NaN or infinite; numbers of a group
            are too large, or too far apart, for float16, or for half of float32's range.
    """
    shifts, levels = _bit_shifts(bits), 2**bits - 1
    if group_size < 1 or group_size % len(shifts) or t.shape[dim] % group_size:
        raise ValueError(
            f"group_size {group_size} must be a multiple of {len(shifts)} that divides axis {dim} "
            f"of shape {t.shape}"
        )
    q, scale, bias = _quantize(np.moveaxis(np.asarray(t), dim, -1), group_size, bits, dtype)
    values = np.clip(np.rint(q, out=q), 0, levels, out=q).astype(np.uint16)
    values = values.reshape(*values.shape[:-1], -1, len(shifts))
    packed_words = values[..., 0] << shifts[0]
    for number, shift in enumerate(shifts[1:], 1):
        packed_words |= values[..., number] << shift
    return packed_words, scale.astype(dtype), bias.astype(dtype)


def _quantize(
    t: np.ndarray, group_size: int, bits: int, dtype: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Quantize groups of values: returns codes (as float32), scales and biases."""
    half, levels = dtype == np.float16, np.float32(2**bits - 1)
    to_dtype = _float16 if half else _float32
    with np.errstate(over="ignore", invalid="ignore"):
        groups = to_dtype(t).reshape(*t.shape[:-1], -1, group_size)
        low, high = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
        bias = low if half else _round_down_to_bfloat16(low)
        scale = to_dtype(to_dtype(high - bias) / levels)
        scale = scale if half else -_round_down_to_bfloat16(-scale)
        top = to_dtype(to_dtype(levels * scale) + bias)  # the largest number that comes back
    if not np.isfinite(top).all():
        most = "float16's 65504" if half else "1.7e38"
        raise ValueError(
            f"NaN, infinity and numbers past {most}, or so far apart, have no {bits}-bit form"
        )
    q = to_dtype(groups - bias)
    return (
        to_dtype(np.divide(q, np.where(scale == 0, np.float32(1), scale), out=q)),
        scale,
        bias,
    )


def _float16(x: np.ndarray) -> np.ndarray:
    """Round an array to float16, kept in float32 and in C order.

    A sum, difference or quotient of two such values that is rounded so is float16's own, and NumPy
    is faster at it.
    """
    return x.astype(np.float16, order="C").astype(np.float32)


def _float32(x: np.ndarray) -> np.ndarray:
    """Convert an array to float32 in C order."""
    return x.astype(np.float32, order="C", copy=False)


def _round_down_to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Round an array down to bfloat16, kept in float32."""
    bits = x.view(np.uint32)  # the upper 16 are bfloat16's
    up = np.where(x < 0, np.uint32(0xFFFF), np.uint32(0))
    return ((bits + up) & np.uint32(0xFFFF0000)).view(np.float32)


def _decompress(
    packed_words: Any, scale: Any, bias: Any, dim: int, bits: int, dtype: popxl.dtype | None
) -> Any:
    """Dequantize packed words in a graph, to the same values as the NumPy version.

    What is packed is transposed, not the values, of which there are as many times more as a word
    has: neighbours in memory are computed from neighbours.
    """
    shifts, column = _bit_shifts(bits), (*packed_words.shape[:-1], 1)
    packed = packed_words, scale.reshape(column), bias.reshape(column)
    if dim % 2 == 0:
        shifts, shape = shifts[:, None], (-1, packed_words.shape[0])
        packed = tuple(materialize_array(part.transpose((1, 2, 0)))[:, :, None] for part in packed)
    else:
        shape = packed_words.shape[0], -1
        packed = tuple(part[..., None] for part in packed)
    packed_words, scale, bias = packed
    half, own = scale.dtype == np.float16, dtype.as_jax() if dtype else scale.dtype

    def to_dtype(x: Any) -> Any:
        return round_to_narrow_float(np.float16, x) if half else x

    q = ((packed_words >> shifts) & (2**bits - 1)).astype(np.float32)
    values = to_dtype(to_dtype(q * upcast_half_types(scale)) + upcast_half_types(bias))
    if not half or own != np.float16:
        values = round_to_narrow_float(own, values)
    return values.astype(own).reshape(shape)


def group_quantize_decompress_numpy(
    t: np.ndarray, group_scale: np.ndarray, group_bias: np.ndarray, dim: int = -1, bits: int = 4
) -> np.ndarray:
    """Dequantize packed words on the host; values are within half a scale of the original.

    Returns:
        float32 where scale and bias are bfloat16, otherwise float16.
    """
    packed_words, column = np.asarray(t), (*t.shape[:-1], 1)
    of = np.float32 if np.asarray(group_scale).dtype == ml_dtypes.bfloat16 else np.float16
    scale, bias = (np.asarray(a).astype(of).reshape(column) for a in (group_scale, group_bias))
    q = (packed_words[..., None] >> _bit_shifts(bits)) & (2**bits - 1)
    groups = q.reshape((*packed_words.shape[:-1], -1)).astype(of) * scale + bias
    return np.moveaxis(groups.reshape((*groups.shape[:-2], -1)), -1, dim)


def _infer_specs(
    t: TensorSpec,
    scale: TensorSpec,
    bias: TensorSpec,
    dim: int,
    bits: int,
    dtype: popxl.dtype | None,
) -> list[TensorSpec]:
    if len(t.shape) != 3 or t.dtype != popxl.uint16:
        raise ValueError(
            "packed values must be uint16 of shape (n, groups, words), but are "
            f"{t.dtype.name} {t.shape}"
        )
    if not -2 <= dim < 2:
        raise ValueError(f"dim must be an axis of the matrix of values, -2 to 1, but is {dim}")
    for what, spec in (("scale", scale), ("bias", bias)):
        if spec.shape not in (t.shape[:-1], (*t.shape[:-1], 1)):
            raise ValueError(
                f"packed values {t.shape} need a {what} of shape {(*t.shape[:-1], 1)}, but it has "
                f"{spec.shape}"
            )
    if scale.dtype != bias.dtype or not scale.dtype.is_floating_point:
        raise ValueError(
            "scale and bias must have one floating-point dtype, but have "
            f"{scale.dtype.name} and {bias.dtype.name}"
        )
    shape = [t.shape[0]]
    shape.insert(dim % 2, t.shape[1] * t.shape[2] * len(_bit_shifts(bits)))
    return [TensorSpec(shape, dtype or scale.dtype)]


_DECOMPRESS = define(
    "group_quantize_decompress",
    _decompress,
    infer=_infer_specs,
    grad=NoGrad("quantised weights are not trained"),
)


def group_quantize_decompress(
    t: popxl.Tensor,
    group_scale: popxl.Tensor,
    group_bias: popxl.Tensor,
    dim: int = -1,
    bits: int = 4,
    dtype: popxl.dtype | None = None,
) -> popxl.Tensor:
    """Dequantize a packed matrix in a graph; see `group_quantize_compress_numpy`.

    Args:
        t: uint16 (n, groups, group_size * bits / 16).
        group_scale, group_bias: of one float dtype, (n, groups, 1) or (n, groups). Arithmetic is in
            float16 if they are, otherwise in float32.
        dim: axis of the result along which groups lie.
        bits: of a value, 4 or 8.
        dtype: of the result; None: that of the scale.

    Returns:
        A matrix.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    return emit(
        _DECOMPRESS, [t, group_scale, group_bias], {"dim": dim, "bits": bits, "dtype": dtype}
    )[0]
