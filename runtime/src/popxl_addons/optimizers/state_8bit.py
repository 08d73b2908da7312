"""Optimizer state in few bits: the formulas, for arrays of NumPy and of JAX.

FlashOptim (Gonzalez Ortiz et al., 2026, arXiv:2602.23349) packs moments into 8 bits, with a scale
for each group of 32 elements, and keeps what rounding took from a 16-bit weight in 8 or 16 bits.
Two things differ here. Scales are bfloat16, not float16, where the roots of second moments below
6e-8 would be zeros. And a second moment that is not zero never gets the code of zero, which would
make the next step of a weight as long as the first moment is large.

Arithmetic is float32, and each code is rounded once, to nearest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

BLOCK = 32
"""Elements that share a scale."""

_FIRST_MAX, _SECOND_MAX = 127.0, 255.0


@dataclass(frozen=True)
class QuantBlocks:
    """Elements in C order, as (outer, length, inner): neighbours along the middle axis share a
    scale, `BLOCK` of them; the last group of a line is shorter if need be."""

    outer: int
    length: int
    inner: int

    @classmethod
    def along_axis(cls, axis: int, shape: tuple[int, ...], shards: int = 1) -> QuantBlocks | None:
        """The groups along an axis of a tensor, or in each of its flat parts.

        Returns:
            None if the parts would cut a group.
        """
        outer, length = math.prod(shape[:axis]), shape[axis]
        inner = math.prod(shape[axis + 1 :])
        if outer % shards == 0:
            return cls(outer // shards, length, inner)
        if outer == 1 and length % (BLOCK * shards) == 0:
            return cls(1, length // shards, inner)
        if inner == 1 and length % BLOCK == 0 and outer * length % (BLOCK * shards) == 0:
            return cls(1, outer * length // shards, 1)
        return None

    @property
    def blocks_per_line(self) -> int:
        """Groups in a line."""
        return -(-self.length // BLOCK)

    def to_blocks(self, x: Any) -> Any:
        """-> (outer, count, GROUP, inner), zeros behind the end of a line."""
        x = x.reshape(self.outer, self.length, self.inner)
        missing = self.blocks_per_line * BLOCK - self.length
        if missing:
            x = x.__array_namespace__().pad(x, ((0, 0), (0, missing), (0, 0)))
        return x.reshape(self.outer, self.blocks_per_line, BLOCK, self.inner)

    def elements(self, lines: Any) -> Any:
        """The inverse of `to_blocks`, flat."""
        lines = lines.reshape(self.outer, self.blocks_per_line * BLOCK, self.inner)
        return lines[:, : self.length].reshape(-1)


def scales_shape(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    """Shape of the scales of a tensor in groups along an axis."""
    return tuple(-(-n // BLOCK) if i == axis else n for i, n in enumerate(shape))


# ---- moments ------------------------------------------------------------------------------------
def quantize_first_moment(moment: Any, blocks: QuantBlocks) -> tuple[Any, Any]:
    """A first moment -> codes, int8 like it, and scales, bfloat16 and flat.

    The codes are finest near zero: those of x in [-1, 1] stand at 2x / (1 + |x|).
    """
    xp = moment.__array_namespace__()
    ratio, scales = _normalize_by_block(xp, blocks.to_blocks(moment))
    codes = xp.round(2 * ratio / (1 + xp.abs(ratio)) * _FIRST_MAX)
    return _codes(blocks, codes, xp.int8, moment.shape), scales


def dequantize_first_moment(codes: Any, scales: Any, blocks: QuantBlocks) -> Any:
    """The inverse of `quantize_first_moment`, float32."""
    xp = codes.__array_namespace__()
    z = blocks.to_blocks(codes.astype(xp.float32)) / _FIRST_MAX
    values = z / (2 - xp.abs(z)) * _broadcast_scales(scales, blocks)
    return blocks.elements(values).reshape(codes.shape)


def quantize_second_moment(moment: Any, blocks: QuantBlocks) -> tuple[Any, Any]:
    """A second moment, at least 0 -> codes of its root, uint8 like it, and scales, bfloat16 and
    flat. Only zeros have the code 0."""
    xp = moment.__array_namespace__()
    lines = blocks.to_blocks(moment)
    ratio, scales = _normalize_by_block(xp, xp.sqrt(lines))
    codes = xp.where(lines > 0, xp.maximum(xp.round(ratio * _SECOND_MAX), 1), 0)
    return _codes(blocks, codes, xp.uint8, moment.shape), scales


def dequantize_second_moment(codes: Any, scales: Any, blocks: QuantBlocks) -> Any:
    """The inverse of `quantize_second_moment`, float32."""
    xp = codes.__array_namespace__()
    root = (
        blocks.to_blocks(codes.astype(xp.float32)) / _SECOND_MAX * _broadcast_scales(scales, blocks)
    )
    return blocks.elements(root * root).reshape(codes.shape)


def _normalize_by_block(xp: Any, lines: Any) -> tuple[Any, Any]:
    """Elements divided by the scale of their group, in [-1, 1], and the scales.

    The bits of positive floats are ordered as the floats, and the largest integer of many is found
    several times faster on CPUs.
    """
    largest = xp.abs(lines).view(xp.int32).max(axis=2).view(xp.float32)
    scales = largest.astype(ml_dtypes.bfloat16)
    divisor = scales.astype(xp.float32)[:, :, None]
    divisor = xp.where(divisor > 0, divisor, 1)  # of a group of zeros
    return xp.clip(lines / divisor, -1, 1), scales.reshape(-1)


def _broadcast_scales(scales: Any, blocks: QuantBlocks) -> Any:
    """Scales in float32, as `QuantBlocks.to_blocks` divides."""
    xp = scales.__array_namespace__()
    return scales.astype(xp.float32).reshape(blocks.outer, blocks.blocks_per_line, 1, blocks.inner)


def _codes(blocks: QuantBlocks, codes: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
    return blocks.elements(codes).astype(dtype).reshape(shape)


# ---- weights ------------------------------------------------------------------------------------
_SIGNIFICANT = {"bfloat16": 8, "float16": 11}  # bits, the hidden one among them
_LEAST_HALF_STEP = {"bfloat16": 2.0**-126, "float16": 2.0**-25}  # as far as float32 is normal


def split_weight(weight: Any, dtype: Any, bits: int) -> tuple[Any, Any]:
    """A float32 weight -> the weight rounded to a 16-bit `dtype`, and what that took, in units of
    its largest value: int8 or int16, by `bits`."""
    low = weight.astype(dtype)
    return low, quantize_residual(weight, low, bits)


def quantize_residual(weight: Any, low: Any, bits: int) -> Any:
    """What `low`, a float32 weight rounded to 16 bits, lacks of it, int8 or int16."""
    xp = weight.__array_namespace__()
    rest = (weight - low.astype(xp.float32)) / _half_step(low)
    rest = xp.where(xp.isfinite(rest), xp.clip(rest, -1, 1), 0)
    code = xp.int8 if bits == 8 else xp.int16
    return xp.round(rest * float(2 ** (bits - 1) - 1)).astype(code)


def dequantize_residual(low: Any, residual: Any) -> Any:
    """What rounding took from a weight, float32: to be added to it."""
    xp = low.__array_namespace__()
    largest = float(xp.iinfo(residual.dtype).max)
    return residual.astype(xp.float32) / largest * _half_step(low)


def join_weight(low: Any, residual: Any) -> Any:
    """The inverse of `split`, float32."""
    xp = low.__array_namespace__()
    return low.astype(xp.float32) + dequantize_residual(low, residual)


def _half_step(low: Any) -> Any:
    """Half the distance from a 16-bit value to the next larger one."""
    xp, name = low.__array_namespace__(), np.dtype(low.dtype).name
    exponent = low.astype(xp.float32).view(xp.uint32) & xp.uint32(0x7F800000)
    step = exponent.view(xp.float32) * xp.float32(2.0 ** -_SIGNIFICANT[name])
    return xp.maximum(step, xp.float32(_LEAST_HALF_STEP[name]))
