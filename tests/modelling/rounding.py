"""Quantised weights as numpy rounds them."""

from __future__ import annotations

import numpy as np
from ml_dtypes import bfloat16

GROUP = 8


def rounded(weight: np.ndarray, size: int = GROUP, bits: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """Returns the quantized and dequantized weight (in, out) and the step of each element,
    float32."""
    features, outputs = weight.shape
    groups = weight.astype(np.float32).reshape(features // size, size, outputs)
    low = _bfloat16_towards(-np.inf, groups.min(1, keepdims=True))
    range_ = groups.max(1, keepdims=True) - low
    step = _bfloat16_towards(np.inf, range_ / np.float32(2**bits - 1))
    kept = np.rint((groups - low) / np.where(step == 0, 1, step)) * step + low
    return kept.reshape(weight.shape), np.broadcast_to(step, groups.shape).reshape(weight.shape)


def _bfloat16_towards(end: float, x: np.ndarray) -> np.ndarray:
    """The nearest number of bfloat16 in this direction, float32."""
    near = x.astype(bfloat16)
    past = near.astype(np.float32) > x if end < 0 else near.astype(np.float32) < x
    return np.where(past, np.nextafter(near, bfloat16(end)), near).astype(np.float32)


def fake_quantize_weight(weight: np.ndarray, size: int, bits: int) -> np.ndarray:
    """Quantizes and dequantizes a weight: (out, in) -> the same shape, float32."""
    return rounded(weight.T, size, bits)[0].T


def is_quantized(name: str, weight: np.ndarray) -> bool:
    """By Hugging Face's names: the linear layers but the head's and those that choose experts."""
    others = ("wte", "shared.", "embed_tokens", "lm_head", "relative_attention_bias")
    others += ("router", "mlp.gate.", "shared_expert_gate", "embed_positions", "final_logits_bias")
    return weight.ndim == 2 and not any(other in name for other in others)


def rounded_weights(
    weights: dict[str, np.ndarray], size: int, bits: int = 4
) -> dict[str, np.ndarray]:
    """Their weights are (out, in)."""
    return {
        n: fake_quantize_weight(w, size, bits) if is_quantized(n, w) else w
        for n, w in weights.items()
    }
