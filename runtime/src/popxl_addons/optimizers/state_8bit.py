"""8-bit quantization of optimizer moments and rounding residuals, for NumPy and JAX.

FlashOptim (Gonzalez Ortiz et al., 2026, arXiv:2602.23349) quantizes moments to 8 bits with a scale
per block of 32 elements, and the residual of rounding a weight to 16 bits to 8 or 16 bits. Two
things differ here. Scales are bfloat16, because in float16 the roots of second moments below 6e-8
are zero. And a nonzero second moment never has the code of zero, which would make the next step of
a weight as large as the first moment.

Arithmetic is float32; each code is rounded once, to nearest.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

BLOCK = 32
"""Number of elements that share a scale."""

_FIRST_MAX, _SECOND_MAX = 127.0, 255.0


class QuantBlocks(NamedTuple):
    """Quantization blocks along the middle axis of a tensor viewed as (outer, length, inner).

    `BLOCK` consecutive elements along the middle axis share a scale; the last block can be shorter.
    """

    outer: int
    length: int
    inner: int

    @classmethod
    def along_axis(cls, axis: int, shape: tuple[int, ...], shards: int = 1) -> QuantBlocks | None:
        """Return the quantization blocks along an axis of a tensor, or of its flat shards.

        None if the shards would split a block.
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
        """Number of quantization blocks along the middle axis."""
        return -(-self.length // BLOCK)

    def to_blocks(self, x: Any) -> Any:
        """Reshape to (outer, blocks_per_line, BLOCK, inner), zero-padded along the middle axis."""
        x = x.reshape(self.outer, self.length, self.inner)
        missing = self.blocks_per_line * BLOCK - self.length
        if missing:
            x = x.__array_namespace__().pad(x, ((0, 0), (0, missing), (0, 0)))
        return x.reshape(self.outer, self.blocks_per_line, BLOCK, self.inner)

    def from_blocks(self, blocks: Any) -> Any:
        """Join quantization blocks to a flat array without padding; the inverse of `to_blocks`."""
        padded = blocks.reshape(self.outer, self.blocks_per_line * BLOCK, self.inner)
        return padded[:, : self.length].reshape(-1)


def scales_shape(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    """Return the shape of the scales of a tensor that is quantized in blocks along an axis."""
    return tuple(-(-n // BLOCK) if i == axis else n for i, n in enumerate(shape))


# ---- moments ------------------------------------------------------------------------------------
def quantize_first_moment(moment: Any, blocks: QuantBlocks) -> tuple[Any, Any]:
    """Quantize a first moment to int8 codes, of its shape, and bfloat16 scales (blocks,).

    Codes are finest near zero: x in [-1, 1] has the code of 2x / (1 + |x|).
    """
    xp = moment.__array_namespace__()
    ratio, scales = _normalize_by_block(xp, blocks.to_blocks(moment))
    codes = xp.round(2 * ratio / (1 + xp.abs(ratio)) * _FIRST_MAX)
    return _to_codes(blocks, codes, xp.int8, moment.shape), scales


def dequantize_first_moment(codes: Any, scales: Any, blocks: QuantBlocks) -> Any:
    """Dequantize a first moment to float32, of the codes' shape."""
    xp = codes.__array_namespace__()
    z = blocks.to_blocks(codes.astype(xp.float32)) / _FIRST_MAX
    values = z / (2 - xp.abs(z)) * _broadcast_scales(scales, blocks)
    return blocks.from_blocks(values).reshape(codes.shape)


def quantize_second_moment(moment: Any, blocks: QuantBlocks) -> tuple[Any, Any]:
    """Quantize a second moment's root to uint8 codes, of its shape, and bfloat16 scales.

    Only zeros have the code 0.
    """
    xp = moment.__array_namespace__()
    values = blocks.to_blocks(moment)
    ratio, scales = _normalize_by_block(xp, xp.sqrt(values))
    codes = xp.where(values > 0, xp.maximum(xp.round(ratio * _SECOND_MAX), 1), 0)
    return _to_codes(blocks, codes, xp.uint8, moment.shape), scales


def dequantize_second_moment(codes: Any, scales: Any, blocks: QuantBlocks) -> Any:
    """Dequantize a second moment to float32, of the codes' shape."""
    xp = codes.__array_namespace__()
    root = (
        blocks.to_blocks(codes.astype(xp.float32)) / _SECOND_MAX * _broadcast_scales(scales, blocks)
    )
    return blocks.from_blocks(root * root).reshape(codes.shape)


def _normalize_by_block(xp: Any, values: Any) -> tuple[Any, Any]:
    """Divide each element by its quantization block's scale; returns values in [-1, 1] and scales.

    The maximum is that of the bits as integers, which have the order of positive floats: CPUs find
    it several times faster.
    """
    largest = xp.abs(values).view(xp.int32).max(axis=2).view(xp.float32)
    scales = largest.astype(ml_dtypes.bfloat16)
    divisor = scales.astype(xp.float32)[:, :, None]
    divisor = xp.where(divisor > 0, divisor, 1)  # a block of zeros has scale 0
    return xp.clip(values / divisor, -1, 1), scales.reshape(-1)


def _broadcast_scales(scales: Any, blocks: QuantBlocks) -> Any:
    """Reshape scales to broadcast over quantization blocks: (outer, blocks_per_line, 1, inner)."""
    xp = scales.__array_namespace__()
    return scales.astype(xp.float32).reshape(blocks.outer, blocks.blocks_per_line, 1, blocks.inner)


def _to_codes(blocks: QuantBlocks, codes: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
    """Convert quantization blocks of integers to `dtype` codes of the moment's shape."""
    return blocks.from_blocks(codes).astype(dtype).reshape(shape)


# ---- weights ------------------------------------------------------------------------------------
_SIGNIFICANT_BITS = {"bfloat16": 8, "float16": 11}  # with the hidden bit
_MIN_HALF_STEP = {"bfloat16": 2.0**-126, "float16": 2.0**-25}  # normal float32 numbers


def split_weight(weight: Any, dtype: Any, bits: int) -> tuple[Any, Any]:
    """Split a float32 weight into a 16-bit weight and a quantized residual of the rounding.

    The residual is int8 or int16, according to `bits`.
    """
    rounded = weight.astype(dtype)
    return rounded, quantize_residual(weight, rounded, bits)


def quantize_residual(weight: Any, rounded: Any, bits: int) -> Any:
    """Quantize the residual of rounding a float32 weight to 16 bits: int8 or int16."""
    xp = weight.__array_namespace__()
    ratio = (weight - rounded.astype(xp.float32)) / _half_rounding_step(rounded)
    ratio = xp.where(xp.isfinite(ratio), xp.clip(ratio, -1, 1), 0)
    code = xp.int8 if bits == 8 else xp.int16
    return xp.round(ratio * float(2 ** (bits - 1) - 1)).astype(code)


def dequantize_residual(rounded: Any, residual: Any) -> Any:
    """Dequantize a rounding residual to float32, to be added to the rounded weight."""
    xp = rounded.__array_namespace__()
    largest = float(xp.iinfo(residual.dtype).max)
    return residual.astype(xp.float32) / largest * _half_rounding_step(rounded)


def join_weight(rounded: Any, residual: Any) -> Any:
    """Add 16-bit weight and dequantized residual: a float32 weight; inverse of `split_weight`."""
    xp = rounded.__array_namespace__()
    return rounded.astype(xp.float32) + dequantize_residual(rounded, residual)


def _half_rounding_step(rounded: Any) -> Any:
    """Return half the distance from a 16-bit value to the next larger one, float32."""
    xp, name = rounded.__array_namespace__(), np.dtype(rounded.dtype).name
    exponent = rounded.astype(xp.float32).view(xp.uint32) & xp.uint32(0x7F800000)
    step = exponent.view(xp.float32) * xp.float32(2.0 ** -_SIGNIFICANT_BITS[name])
    return xp.maximum(step, xp.float32(_MIN_HALF_STEP[name]))
