"""The angles of rotary positions, scaled for long texts in the ways that transformers has.

All arithmetic is in float32, as transformers does it.
"""

from __future__ import annotations

import math

import numpy as np

import popxl
from config.llama import LayerType, LlamaModel, LlamaRope
from config.values import factors
from modelling.layers import (
    BlockContext,
    RopeTables,
    apply_rotary_pos_emb,
    cast,
    constant_rope_tables,
)
from popxl import Tensor

_SINGLE = np.float32


class Rope:
    """The rotary positions of layers of a type."""

    def __init__(self, c: LlamaModel, layer: LayerType) -> None:
        self._model, self._layer = c, layer

    def __call__(self, q: Tensor, k: Tensor, ctx: BlockContext) -> tuple[Tensor, Tensor]:
        """Turn queries and keys, (batch, length, heads, head_dim), by the positions of tokens."""
        if not self._layer.has_rope:
            return q, k

        def make(positions: int) -> RopeTables:
            return rotary_tables(self._model, self._layer, positions, ctx.max_length)

        sin, cos, *growth = ctx.rope_tables(make, q.shape[1])
        q, k = (apply_rotary_pos_emb(t, sin, cos, self._model.rotary_dim) for t in (q, k))
        for factor in growth:
            q = q * cast(factor.reshape((*factor.shape, 1)), q.dtype)
        return q, k


def rotary_tables(model: LlamaModel, layer: LayerType, positions: int, length: int) -> RopeTables:
    """The angles of positions 0, 1, ... in layers of a type.

    Args:
        positions: how many.
        length: tokens of the longest text, on which scaling may depend.
    """
    if layer.is_sliding and model.rope_local_base_freq is not None:
        periods = _periods(model.rope_local_base_freq, model.rotary_dim)
        return constant_rope_tables(1 / periods, positions)
    frequencies, scale = scaled_frequencies(model, length)
    tables = constant_rope_tables(frequencies, positions, scale)
    beta = model.rope_parameters.llama_4_scaling_beta
    return (*tables, _growth(model.rope_parameters, beta, positions)) if beta else tables


def _growth(rope: LlamaRope, beta: float, positions: int) -> Tensor:
    """The factors on queries, which grow with each text as long as those of pretraining."""
    original = rope.original_max_position_embeddings
    assert original is not None
    texts = np.floor(np.arange(positions, dtype=_SINGLE) / _SINGLE(original))
    growth = 1 + _SINGLE(beta) * np.log(1 + texts)
    return popxl.constant(growth[:, None], popxl.float32, "query_growth")


def scaled_frequencies(model: LlamaModel, length: int) -> tuple[np.ndarray, float]:
    """Radians from one position to the next, float32 (rotated / 2,), and the factor on sines.

    Args:
        length: tokens of the longest text.
    """
    rope, made_for = model.rope_parameters, model.max_position_embeddings
    original = rope.original_max_position_embeddings or made_for
    factor = rope.factor or made_for / original
    periods = _periods(rope.rope_theta, model.rotary_dim)
    match rope.rope_type:
        case "default":
            return 1 / periods, 1.0
        case "linear":
            return 1 / periods / _SINGLE(factor), 1.0
        case "dynamic":
            # NTK-aware scaling: the last pair turns as much over a longer text.
            growth = factor * (max(length, made_for) / made_for) - (factor - 1)
            theta = rope.rope_theta * growth ** (model.rotary_dim / (model.rotary_dim - 2))
            return 1 / _periods(theta, model.rotary_dim), 1.0
        case "llama3":
            return _llama3(rope, factor, original, 1 / periods), 1.0
        case "longrope":
            divisors = factors(rope.long_factor if length > original else rope.short_factor)
            periods = np.array(divisors, _SINGLE) * periods
            return 1 / periods, _longrope_scale(rope, factor, original)
        case "yarn":
            return _yarn(rope, factor, original, 1 / periods), _yarn_scale(rope, factor)


def _periods(theta: float, rotary_dim: int) -> np.ndarray:
    """Positions in which each pair of features turns by one radian."""
    return _SINGLE(theta) ** (np.arange(0, rotary_dim, 2, dtype=_SINGLE) / _SINGLE(rotary_dim))


def _llama3(rope: LlamaRope, factor: float, original: int, plain: np.ndarray) -> np.ndarray:
    """Long wavelengths are stretched, short ones stay, those between are mixed."""
    low, high = rope.low_freq_factor, rope.high_freq_factor
    wavelengths = _SINGLE(2 * math.pi) / plain
    stretched = plain / _SINGLE(factor)
    share = (_SINGLE(original) / wavelengths - _SINGLE(low)) / _SINGLE(high - low)
    mixed = (1 - share) * stretched + share * plain
    ends = np.where(wavelengths > original / low, stretched, plain)
    between = (wavelengths <= original / low) & (wavelengths >= original / high)
    return np.where(between, mixed, ends).astype(_SINGLE)


def _longrope_scale(rope: LlamaRope, factor: float, original: int) -> float:
    """Ding et al., arXiv:2402.13753: texts that get longer need sharper attention."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def _yarn(rope: LlamaRope, factor: float, original: int, plain: np.ndarray) -> np.ndarray:
    """Peng et al., arXiv:2309.00071: pairs that turn often in a text of pretraining stay, those
    that turn seldom are stretched, those between are mixed, by their number."""
    rotary_dim = 2 * len(plain)

    def pair_with(turns: float) -> float:
        angle = math.log(original / (turns * 2 * math.pi))
        return rotary_dim * angle / (2 * math.log(rope.rope_theta))

    fast, slow = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    ends = (math.floor(fast), math.ceil(slow)) if rope.truncate else (fast, slow)
    first, last = max(ends[0], 0), min(ends[1], rotary_dim - 1)
    number = np.arange(len(plain), dtype=_SINGLE)
    stretch = np.clip((number - _SINGLE(first)) / _SINGLE((last - first) or 0.001), 0, 1)
    return (plain / _SINGLE(factor) * stretch + plain * (1 - stretch)).astype(_SINGLE)


def _yarn_scale(rope: LlamaRope, factor: float) -> float:
    if rope.attention_factor is not None or factor <= 1:
        return rope.attention_factor or 1.0
    if rope.mscale and rope.mscale_all_dim:
        slopes = rope.mscale, rope.mscale_all_dim
        over, under = (0.1 * slope * math.log(factor) + 1 for slope in slopes)
        return over / under
    return 0.1 * math.log(factor) + 1
