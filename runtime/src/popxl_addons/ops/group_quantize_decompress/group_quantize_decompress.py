"""Weights in 4 bits: groups of neighbouring values share a scale and a bias.

A group of values x is stored as integers q in 0..15 with x ≈ q * scale + bias. Four integers
share a uint16, the first in its lowest bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import popxl
from popxl import TensorSpec
from popxl._core.op import emit
from popxl._core.opdef import NoGrad, define

__all__ = [
    "group_quantize_compress_numpy",
    "group_quantize_decompress",
    "group_quantize_decompress_numpy",
]

_LEVELS = 15
_PER_WORD = 4
_SHIFTS = np.arange(_PER_WORD, dtype=np.uint16) * 4


def group_quantize_compress_numpy(
    t: np.ndarray, group_size: int, dim: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Quantise float data.

    Args:
        t: array of n axes.
        group_size: values in a group, a multiple of 4 that divides the length of axis `dim`.
        dim: axis along which neighbours form groups.

    Returns:
        Packed uint16, scale and bias (in the dtype of `t`). Their axes are those of `t`, with
        `dim` moved to the end and cut in two: (..., groups, group_size / 4), and (..., groups, 1)
        for scale and bias.

    Raises:
        ValueError: the group size does not fit.
    """
    if group_size < 1 or group_size % _PER_WORD or t.shape[dim] % group_size:
        raise ValueError(
            f"group_size {group_size} must be a multiple of {_PER_WORD} that divides axis {dim} "
            f"of shape {t.shape}"
        )
    moved = np.moveaxis(np.asarray(t, np.float32), dim, -1)
    groups = moved.reshape(*moved.shape[:-1], -1, group_size)
    low = groups.min(-1, keepdims=True)
    scale = (groups.max(-1, keepdims=True) - low) / _LEVELS
    # Quantise with the values that will be used to get back: scale and bias as they are stored.
    scale, low = scale.astype(t.dtype), low.astype(t.dtype)
    steps = np.where(scale == 0, 1, scale).astype(np.float32)
    q = np.clip(np.rint((groups - low.astype(np.float32)) / steps), 0, _LEVELS).astype(np.uint16)
    words = q.reshape(*q.shape[:-1], -1, _PER_WORD) << _SHIFTS
    return np.bitwise_or.reduce(words, -1), scale, low


def _unpacked(words: Any, scale: Any, bias: Any, dim: int) -> Any:
    """The values of packed arrays, of numpy or of the device."""
    q = (words[..., None] >> _SHIFTS) & 15
    groups = q.reshape((*words.shape[:-1], -1)).astype(scale.dtype) * scale + bias
    moved = groups.reshape((*groups.shape[:-2], -1))
    axes = list(range(moved.ndim))
    axes.insert(dim % moved.ndim, axes.pop())
    return moved.transpose(axes)


def group_quantize_decompress_numpy(
    t: np.ndarray, group_scale: np.ndarray, group_bias: np.ndarray, dim: int
) -> np.ndarray:
    """The values that `group_quantize_compress_numpy` stored, up to half a step of their group."""
    return _unpacked(t, group_scale, group_bias, dim)


def _infer(t: TensorSpec, scale: TensorSpec, bias: TensorSpec, dim: int) -> list[TensorSpec]:
    if scale.shape != (*t.shape[:-1], 1) or bias.shape != scale.shape:
        raise ValueError(
            f"packed values {t.shape} need a scale and bias of shape {(*t.shape[:-1], 1)}"
        )
    shape = list(t.shape[:-2])
    shape.insert(dim % (len(shape) + 1), t.shape[-2] * t.shape[-1] * _PER_WORD)
    return [TensorSpec(shape, scale.dtype)]


_DECOMPRESS = define(
    "group_quantize_decompress",
    _unpacked,
    infer=_infer,
    grad=NoGrad("quantised weights are not trained"),
)


def group_quantize_decompress(
    t: popxl.Tensor, group_scale: popxl.Tensor, group_bias: popxl.Tensor, dim: int = -1
) -> popxl.Tensor:
    """The values of a packed tensor, see `group_quantize_compress_numpy`.

    Args:
        t: uint16 (..., groups, group_size / 4).
        group_scale, group_bias: float (..., groups, 1).
        dim: axis of the result along which groups lie.

    Returns:
        Values in the dtype of the scale.
    """
    return emit(_DECOMPRESS, [t, group_scale, group_bias], {"dim": dim})[0]
