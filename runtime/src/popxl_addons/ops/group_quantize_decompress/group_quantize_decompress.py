"""Weights in 4 or 8 bits: groups of neighbouring values share a scale and a bias.

A group of values x is stored as integers q in 0..15 or 0..255 with x ≈ q * scale + bias; scale and
bias are float16. Four or two integers share a uint16, the first in its highest bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import popxl
from popxl import TensorSpec
from popxl._ir.opdef import NoGrad, define
from popxl.ops._emit import emit
from popxl.ops._numerics import in_precision_of, widen
from popxl.ops.placement import materialised

__all__ = [
    "group_quantize_compress_numpy",
    "group_quantize_decompress",
    "group_quantize_decompress_numpy",
]

_WORD = 16


def _shifts(bits: int) -> np.ndarray:
    """Of the values in a word: the first is the highest."""
    if bits not in (4, 8):
        raise ValueError(f"values have 4 or 8 bits, not {bits}")
    return np.arange(_WORD - bits, -1, -bits, dtype=np.uint16)


def group_quantize_compress_numpy(
    t: np.ndarray, group_size: int, dim: int = -1, bits: int = 4
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Quantise float data. All arithmetic is in float16.

    Args:
        t: array of n axes.
        group_size: values in a group, a multiple of those in a word that divides the length of
            axis `dim`.
        dim: axis along which neighbours form groups.
        bits: of a value, 4 or 8.

    Returns:
        Packed uint16, and scale and bias, float16. Their axes are those of `t`, with `dim` moved
        to the end and cut in two: (..., groups, group_size * bits / 16), and (..., groups, 1) for
        scale and bias.

    Raises:
        ValueError: the group size does not fit; an element is NaN or infinite, in float16 too.
    """
    shifts, levels = _shifts(bits), 2**bits - 1
    if group_size < 1 or group_size % len(shifts) or t.shape[dim] % group_size:
        raise ValueError(
            f"group_size {group_size} must be a multiple of {len(shifts)} that divides axis {dim} "
            f"of shape {t.shape}"
        )
    with np.errstate(over="ignore"):
        moved = _float16(np.moveaxis(np.asarray(t), dim, -1))
    if not np.isfinite(moved).all():
        raise ValueError(f"NaN, infinity and numbers past float16's 65504 have no {bits}-bit form")
    groups = moved.reshape(*moved.shape[:-1], -1, group_size)
    bias = groups.min(-1, keepdims=True)
    scale = _float16(_float16(groups.max(-1, keepdims=True) - bias) / np.float32(levels))
    q = _float16(groups - bias)
    q = _float16(np.divide(q, np.where(scale == 0, np.float32(1), scale), out=q))
    values = np.clip(np.rint(q, out=q), 0, levels, out=q).astype(np.uint16)
    values = values.reshape(*values.shape[:-1], -1, len(shifts))
    words = values[..., 0] << shifts[0]
    for number, shift in enumerate(shifts[1:], 1):
        words |= values[..., number] << shift
    return words, scale.astype(np.float16), bias.astype(np.float16)


def _float16(x: np.ndarray) -> np.ndarray:
    """Rounded to float16, in float32, in C order. A sum, difference or quotient of two such values
    that is rounded so is float16's own, and NumPy is faster at it."""
    return x.astype(np.float16, order="C").astype(np.float32)


def _decompress(words: Any, scale: Any, bias: Any, dim: int, bits: int) -> Any:
    """As numpy does: the product is rounded, and then the sum.

    What is packed is transposed, not the values, of which there are as many times more as a word
    has: neighbours in memory are computed from neighbours.
    """
    shifts, column = _shifts(bits), (*words.shape[:-1], 1)
    packed = words, scale.reshape(column), bias.reshape(column)
    if dim % 2 == 0:
        shifts, shape = shifts[:, None], (-1, words.shape[0])
        packed = tuple(materialised(part.transpose((1, 2, 0)))[:, :, None] for part in packed)
    else:
        shape = words.shape[0], -1
        packed = tuple(part[..., None] for part in packed)
    words, scale, bias = packed
    q, dtype = ((words >> shifts) & (2**bits - 1)).astype(np.float32), scale.dtype
    values = in_precision_of(dtype, q * widen(scale)) + widen(bias)
    return in_precision_of(dtype, values).astype(dtype).reshape(shape)


def group_quantize_decompress_numpy(
    t: np.ndarray, group_scale: np.ndarray, group_bias: np.ndarray, dim: int = -1, bits: int = 4
) -> np.ndarray:
    """The values that `group_quantize_compress_numpy` stored, up to half a step of their group.

    Returns:
        float16.
    """
    words, column = np.asarray(t), (*t.shape[:-1], 1)
    scale, bias = (np.asarray(a, np.float16).reshape(column) for a in (group_scale, group_bias))
    q = (words[..., None] >> _shifts(bits)) & (2**bits - 1)
    groups = q.reshape((*words.shape[:-1], -1)).astype(np.float16) * scale + bias
    return np.moveaxis(groups.reshape((*groups.shape[:-2], -1)), -1, dim)


def _infer(
    t: TensorSpec, scale: TensorSpec, bias: TensorSpec, dim: int, bits: int
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
    shape.insert(dim % 2, t.shape[1] * t.shape[2] * len(_shifts(bits)))
    return [TensorSpec(shape, scale.dtype)]


_DECOMPRESS = define(
    "group_quantize_decompress",
    _decompress,
    infer=_infer,
    grad=NoGrad("quantised weights are not trained"),
)


def group_quantize_decompress(
    t: popxl.Tensor,
    group_scale: popxl.Tensor,
    group_bias: popxl.Tensor,
    dim: int = -1,
    bits: int = 4,
) -> popxl.Tensor:
    """The values of a packed matrix, see `group_quantize_compress_numpy`.

    Args:
        t: uint16 (n, groups, group_size * bits / 16).
        group_scale, group_bias: float16 (n, groups, 1) or (n, groups).
        dim: axis of the result along which groups lie.
        bits: of a value, 4 or 8.

    Returns:
        A matrix in the dtype of the scale.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    return emit(_DECOMPRESS, [t, group_scale, group_bias], {"dim": dim, "bits": bits})[0]
