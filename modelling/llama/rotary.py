"""The angles of rotary positions, scaled for long texts in the ways that transformers has.

All arithmetic is in float32, as transformers does it.
"""

from __future__ import annotations

import math

import numpy as np

import popxl
from config.llama import FULL, UNROTATED, UNROTATED_WINDOW, WINDOW, LlamaModel, LlamaRotary, numbers
from modelling.layers import Context, Tables, cast, constant_tables, rotate_halves
from popxl import Tensor

_SINGLE = np.float32


class Rope:
    """The rotary positions of layers of a type.

    Args:
        layer_type: see `config.llama`.
    """

    def __init__(self, c: LlamaModel, layer_type: str) -> None:
        self._model, self._type = c, layer_type
        self._is_absent = layer_type in (UNROTATED, UNROTATED_WINDOW)

    def __call__(self, q: Tensor, k: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        """Turn queries and keys, (batch, length, heads, head_dim), by the positions of tokens."""
        if self._is_absent:
            return q, k

        def make(positions: int) -> Tables:
            return rotary_tables(self._model, self._type, positions, ctx.max_length)

        sin, cos, *growth = ctx.tables(make, q.shape[1])
        q, k = (rotate_halves(t, sin, cos, self._model.attention.rotated) for t in (q, k))
        for factor in growth:
            q = q * cast(factor.reshape((*factor.shape, 1)), q.dtype)
        return q, k


def rotary_tables(model: LlamaModel, layer_type: str, positions: int, length: int) -> Tables:
    """The angles of positions 0, 1, ... in layers of a type.

    Args:
        positions: how many.
        length: tokens of the longest text, on which scaling may depend.
    """
    assert layer_type in (FULL, WINDOW)
    attention, rotary = model.attention, model.attention.rotary
    if layer_type == WINDOW and rotary.local_theta is not None:
        return constant_tables(_frequencies(rotary.local_theta, attention.rotated), positions)
    frequencies, scale = scaled_frequencies(rotary, attention.rotated, model.max_length, length)
    tables = constant_tables(frequencies, positions, scale)
    return (*tables, _growth(rotary, positions)) if rotary.query_growth else tables


def _growth(rotary: LlamaRotary, positions: int) -> Tensor:
    """The factors on queries, which grow with each text as long as those of pretraining."""
    assert rotary.original_length is not None
    texts = np.floor(np.arange(positions, dtype=_SINGLE) / _SINGLE(rotary.original_length))
    factors = 1 + _SINGLE(rotary.query_growth) * np.log(1 + texts)
    return popxl.constant(factors[:, None], popxl.float32, "query_growth")


def scaled_frequencies(
    rotary: LlamaRotary, rotated: int, max_length: int, length: int
) -> tuple[np.ndarray, float]:
    """Radians from one position to the next, float32 (rotated / 2,), and the factor on sines.

    Args:
        rotated: features of a head that are turned.
        max_length: `LlamaModel.max_length`.
        length: tokens of the longest text.
    """
    match rotary.type:
        case "default":
            return _frequencies(rotary.theta, rotated), 1.0
        case "linear":
            return _frequencies(rotary.theta, rotated) / _SINGLE(rotary.factor), 1.0
        case "dynamic":
            return _frequencies(_longer_theta(rotary, rotated, max_length, length), rotated), 1.0
        case "llama3":
            return _llama3(rotary, rotated), 1.0
        case "longrope":
            return _longrope(rotary, rotated, length), _longrope_scale(rotary, max_length)
        case "yarn":
            return _yarn(rotary, rotated), _yarn_scale(rotary)


def _frequencies(theta: float, rotated: int) -> np.ndarray:
    exponents = np.arange(0, rotated, 2, dtype=_SINGLE) / _SINGLE(rotated)
    return 1 / _SINGLE(theta) ** exponents


def _longer_theta(rotary: LlamaRotary, rotated: int, max_length: int, length: int) -> float:
    """The base with which the last pair turns as much over a longer text (NTK-aware scaling)."""
    longer = max(length, max_length) / max_length
    growth = rotary.factor * longer - (rotary.factor - 1)
    return float(rotary.theta * growth ** (rotated / (rotated - 2)))


def _llama3(rotary: LlamaRotary, rotated: int) -> np.ndarray:
    """Long wavelengths are stretched, short ones stay, those between are mixed."""
    frequencies = _frequencies(rotary.theta, rotated)
    original = rotary.original_length
    assert original is not None
    low, high = rotary.low_frequency, rotary.high_frequency
    wavelengths = _SINGLE(2 * math.pi) / frequencies
    stretched = frequencies / _SINGLE(rotary.factor)
    share = (_SINGLE(original) / wavelengths - _SINGLE(low)) / _SINGLE(high - low)
    mixed = (1 - share) * stretched + share * frequencies
    ends = np.where(wavelengths > original / low, stretched, frequencies)
    between = (wavelengths <= original / low) & (wavelengths >= original / high)
    return np.where(between, mixed, ends).astype(_SINGLE)


def _longrope(rotary: LlamaRotary, rotated: int, length: int) -> np.ndarray:
    assert rotary.original_length is not None
    name = "long_factors" if length > rotary.original_length else "short_factors"
    divisors = np.array(numbers(getattr(rotary, name), f"rotary.{name}"), _SINGLE)
    exponents = np.arange(0, rotated, 2, dtype=_SINGLE) / _SINGLE(rotated)
    return 1 / (divisors * _SINGLE(rotary.theta) ** exponents)


def _longrope_scale(rotary: LlamaRotary, max_length: int) -> float:
    """Ding et al., arXiv:2402.13753: texts that get longer need sharper attention."""
    original = rotary.original_length
    assert original is not None
    if rotary.attention_factor is not None:
        return rotary.attention_factor
    factor = max_length / original
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def _yarn(rotary: LlamaRotary, rotated: int) -> np.ndarray:
    """Peng et al., arXiv:2309.00071: pairs that turn often in a text of pretraining stay, those
    that turn seldom are stretched, those between are mixed, by their number."""
    original = rotary.original_length
    assert original is not None

    def pair_with(turns: float) -> float:
        angle = math.log(original / (turns * 2 * math.pi))
        return rotated * angle / (2 * math.log(rotary.theta))

    fast, slow = pair_with(rotary.fast_turns), pair_with(rotary.slow_turns)
    ends = (math.floor(fast), math.ceil(slow)) if rotary.truncate else (fast, slow)
    first, last = max(ends[0], 0), min(ends[1], rotated - 1)
    number = np.arange(rotated // 2, dtype=_SINGLE)
    stretch = np.clip((number - _SINGLE(first)) / _SINGLE((last - first) or 0.001), 0, 1)
    frequencies = _frequencies(rotary.theta, rotated)
    return (frequencies / _SINGLE(rotary.factor) * stretch + frequencies * (1 - stretch)).astype(
        _SINGLE
    )


def _yarn_scale(rotary: LlamaRotary) -> float:
    if rotary.attention_factor is not None:
        return rotary.attention_factor
    return 1.0 if rotary.factor <= 1 else 0.1 * math.log(rotary.factor) + 1
