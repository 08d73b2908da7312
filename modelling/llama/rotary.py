"""RoPE frequencies and their scaling for long contexts, as in transformers.

All arithmetic is in float32, as in transformers.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np

import popxl
from config.llama import LayerType, LlamaRope
from config.values import parse_numbers
from modelling.layers import (
    BlockContext,
    RopeTables,
    apply_rotary_pos_emb,
    cast_if_needed,
    constant_rope_tables,
)
from popxl import Tensor


class RopeModel(Protocol):
    """Interface: the settings that RoPE needs of a model, or of one of its stacks."""

    @property
    def rope_parameters(self) -> LlamaRope: ...
    @property
    def rope_local_base_freq(self) -> float | None: ...
    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def rotary_dim(self) -> int: ...


class Rope:
    """Rotary position embeddings for the layers of one type."""

    def __init__(self, c: RopeModel, layer: LayerType) -> None:
        self._model, self._layer = c, layer

    def __call__(self, q: Tensor, k: Tensor, ctx: BlockContext) -> tuple[Tensor, Tensor]:
        """Rotates queries (b, length, heads, head_dim) and keys (b, length, kv_heads, head_dim)."""
        if not self._layer.has_rope:
            return q, k

        def make_tables(num_positions: int) -> RopeTables:
            return rope_tables(self._model, self._layer, num_positions, ctx.max_length)

        sin, cos, *query_scale = ctx.rope_tables(make_tables, q.shape[1])
        q, k = (apply_rotary_pos_emb(t, sin, cos, self._model.rotary_dim) for t in (q, k))
        for scale in query_scale:
            q = q * cast_if_needed(scale.reshape((*scale.shape, 1)), q.dtype)
        return q, k


def rope_tables(
    model: RopeModel, layer: LayerType, num_positions: int, max_length: int
) -> RopeTables:
    """Returns RoPE tables of positions 0, 1, ... for a layer type; see `RopeTables`.

    Args:
        max_length: tokens of the longest sequence, on which scaling may depend.
    """
    if layer.is_sliding and model.rope_local_base_freq is not None:
        inv_freq = inverse_frequencies(model.rope_local_base_freq, model.rotary_dim)
        return constant_rope_tables(inv_freq, num_positions)
    inv_freq, scale = scaled_frequencies(model, max_length)
    tables = constant_rope_tables(inv_freq, num_positions, scale)
    if not model.rope_parameters.llama_4_scaling_beta:
        return tables
    return (*tables, _query_scale(model.rope_parameters, num_positions))


def _query_scale(rope: LlamaRope, num_positions: int) -> Tensor:
    """Returns Llama 4's scale of queries by position: float32 (num_positions, 1).

    1 + beta * log(1 + floor(position / context of pretraining)).
    """
    original, beta = rope.original_max_position_embeddings, rope.llama_4_scaling_beta
    assert original is not None
    assert beta is not None
    contexts = np.floor(np.arange(num_positions, dtype=np.float32) / np.float32(original))
    scale = 1 + np.float32(beta) * np.log(1 + contexts)
    return popxl.constant(scale[:, None], popxl.float32, "query_growth")


def scaled_frequencies(model: RopeModel, max_length: int) -> tuple[np.ndarray, float]:
    """Returns scaled RoPE frequencies, float32 (rotary_dim / 2,), and the scale of sin and cos.

    Args:
        max_length: tokens of the longest sequence.
    """
    rope = model.rope_parameters
    max_positions = model.max_position_embeddings
    dim = model.rotary_dim
    original = rope.original_max_position_embeddings or max_positions
    factor = rope.factor or max_positions / original
    positions_per_radian = _positions_per_radian(rope.rope_theta, dim)
    match rope.rope_type:
        case "default":
            return 1 / positions_per_radian, 1.0
        case "linear":
            return 1 / positions_per_radian / np.float32(factor), 1.0
        case "dynamic":
            # NTK-aware scaling: the slowest pair turns as far over the longer context.
            growth = factor * (max(max_length, max_positions) / max_positions) - (factor - 1)
            theta = rope.rope_theta * growth ** (dim / (dim - 2))
            return inverse_frequencies(theta, dim), 1.0
        case "llama3":
            return _llama3_frequencies(rope, factor, original, 1 / positions_per_radian), 1.0
        case "longrope":
            divisors = parse_numbers(
                rope.long_factor if max_length > original else rope.short_factor
            )
            scaled = np.array(divisors, np.float32) * positions_per_radian
            return 1 / scaled, _longrope_scale(rope, factor, original)
        case "yarn":
            inv_freq = _yarn_frequencies(rope, factor, original, 1 / positions_per_radian)
            return inv_freq, _yarn_scale(rope, factor)


def inverse_frequencies(theta: float, rotary_dim: int) -> np.ndarray:
    """Returns theta^(-2i / rotary_dim), radians per position: float32 (rotary_dim / 2,)."""
    inv_freq: np.ndarray = 1 / _positions_per_radian(theta, rotary_dim)
    return inv_freq


def _positions_per_radian(theta: float, rotary_dim: int) -> np.ndarray:
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    return np.float32(theta) ** exponents


def _llama3_frequencies(
    rope: LlamaRope, factor: float, original_length: int, inv_freq: np.ndarray
) -> np.ndarray:
    """Scales RoPE frequencies by Llama 3's rule: float32 (rotary_dim / 2,) -> the same shape.

    Divides the frequencies of long wavelengths by the factor, keeps those of short ones, and
    interpolates between.
    """
    low, high = rope.low_freq_factor, rope.high_freq_factor
    wavelengths = np.float32(2 * math.pi) / inv_freq
    divided = inv_freq / np.float32(factor)
    share = (np.float32(original_length) / wavelengths - np.float32(low)) / np.float32(high - low)
    interpolated = (1 - share) * divided + share * inv_freq
    outside = np.where(wavelengths > original_length / low, divided, inv_freq)
    is_between = (wavelengths <= original_length / low) & (wavelengths >= original_length / high)
    return np.where(is_between, interpolated, outside).astype(np.float32)


def _longrope_scale(rope: LlamaRope, factor: float, original_length: int) -> float:
    """Returns LongRoPE's factor of sin and cos, which sharpens attention over longer contexts.

    Ding et al., arXiv:2402.13753.
    """
    if rope.attention_factor is not None:
        return rope.attention_factor
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original_length))


def _yarn_frequencies(
    rope: LlamaRope, factor: float, original_length: int, inv_freq: np.ndarray
) -> np.ndarray:
    """Scales RoPE frequencies by YaRN's rule: float32 (rotary_dim / 2,) -> the same shape.

    Keeps the frequencies of pairs that turn often in the context of pretraining, divides those that
    turn seldom by the factor, and interpolates between (Peng et al., arXiv:2309.00071).
    """
    rotary_dim = 2 * len(inv_freq)

    def find_correction_dim(rotations: float) -> float:
        angle = math.log(original_length / (rotations * 2 * math.pi))
        return rotary_dim * angle / (2 * math.log(rope.rope_theta))

    fast, slow = find_correction_dim(rope.beta_fast), find_correction_dim(rope.beta_slow)
    bounds = (math.floor(fast), math.ceil(slow)) if rope.truncate else (fast, slow)
    first, last = max(bounds[0], 0), min(bounds[1], rotary_dim - 1)
    index = np.arange(len(inv_freq), dtype=np.float32)
    ramp = np.clip((index - np.float32(first)) / np.float32((last - first) or 0.001), 0, 1)
    return (inv_freq / np.float32(factor) * ramp + inv_freq * (1 - ramp)).astype(np.float32)


def _yarn_scale(rope: LlamaRope, factor: float) -> float:
    """Returns the factor by which YaRN multiplies sin and cos."""
    if rope.attention_factor is not None or factor <= 1:
        return rope.attention_factor or 1.0
    if rope.mscale and rope.mscale_all_dim:
        slopes = rope.mscale, rope.mscale_all_dim
        numerator, denominator = (0.1 * slope * math.log(factor) + 1 for slope in slopes)
        return numerator / denominator
    return 0.1 * math.log(factor) + 1
