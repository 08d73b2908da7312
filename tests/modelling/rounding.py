"""Quantised weights as numpy rounds them."""

from __future__ import annotations

import numpy as np

from popxl_addons.ops.group_quantize_decompress import (
    group_quantize_compress_numpy,
    group_quantize_decompress_numpy,
)

GROUP = 8


def rounded(weight: np.ndarray, size: int = GROUP, bits: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """What few bits keep of a weight (in, out), and the step of each element, in float16."""
    features, outputs = weight.shape
    groups = weight.astype(np.float16).reshape(features // size, size, outputs)
    low = groups.min(1, keepdims=True)
    step = (groups.max(1, keepdims=True) - low) / np.float16(2**bits - 1)
    kept = np.rint((groups - low) / step) * step + low
    return kept.reshape(weight.shape), np.broadcast_to(step, groups.shape).reshape(weight.shape)


def in_few_bits(weight: np.ndarray, size: int, bits: int) -> np.ndarray:
    """What the engine leaves of a weight (out, in), float32. Devices take subnormal numbers of
    float16 for 0."""
    parts = group_quantize_compress_numpy(weight, size, bits=bits)
    left = group_quantize_decompress_numpy(*parts, bits=bits)
    return np.where(np.abs(left) < np.finfo(np.float16).tiny, 0, left.astype(np.float32))


def is_quantised(name: str, weight: np.ndarray) -> bool:
    """By Hugging Face's names: the linear layers but the head's and those that choose experts."""
    others = ("wte", "shared.", "embed_tokens", "lm_head", "relative_attention_bias")
    others += ("router", "mlp.gate.", "shared_expert_gate")
    return weight.ndim == 2 and not any(other in name for other in others)


def rounded_weights(
    weights: dict[str, np.ndarray], size: int, bits: int = 4
) -> dict[str, np.ndarray]:
    """Their weights are (out, in)."""
    return {
        n: rounded(w.T, size, bits)[0].T.astype(np.float32) if is_quantised(n, w) else w
        for n, w in weights.items()
    }
