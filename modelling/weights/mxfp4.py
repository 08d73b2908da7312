"""Dequantization of weights in MXFP4: 4-bit values, one power-of-two scale per 32 values.

The format is Microscaling Formats 1.0 of the Open Compute Project. gpt-oss stores its experts as
`<name>_blocks`, uint8 (experts, out features, blocks, 16), two values per byte, the lower half
first, and `<name>_scales`, uint8 (experts, out features, blocks). As in transformers, they become
`<name>` (experts, in features, out features).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial

import ml_dtypes
import numpy as np

from checkpoints.lazy_arrays import Arrays, ArraysView, LazyArrays, OverlayArrays
from modelling.weights.weight_mapping import WeightsError

BLOCKS, SCALES = "_blocks", "_scales"
FP4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
"""Values of the lower three of the four bits; the highest is the sign."""
SCALE_BIAS = 127


def dequantize_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Dequantize MXFP4 exactly, to bfloat16 (experts, out features, in features)."""
    if blocks.shape[:-1] != scales.shape:
        raise WeightsError(
            f"the model's file is damaged: it has blocks {blocks.shape} with scales {scales.shape}"
        )
    experts, outputs, groups, halves = blocks.shape
    values = np.empty((experts, outputs, 2 * halves * groups), ml_dtypes.bfloat16)
    for expert in range(experts):  # one at a time, because temporaries are several times larger
        values[expert] = _dequantize_expert(blocks[expert], scales[expert]).reshape(outputs, -1)
    return values


def _dequantize_expert(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Dequantize one expert: uint8 (out features, blocks, 16) -> (out features, blocks, 16, 2)."""
    values_of_bits = np.concatenate([FP4_VALUES, -FP4_VALUES])
    pairs = np.stack([values_of_bits[blocks & 15], values_of_bits[blocks >> 4]], -1)
    with np.errstate(over="ignore", invalid="ignore"):  # a scale of 255 is not a number
        values: np.ndarray = np.ldexp(pairs, scales.astype(np.int32)[..., None, None] - SCALE_BIAS)
    return values


def dequantize_tensors(tensors: Arrays) -> Arrays:
    """Returns a file's tensors; those in MXFP4 are dequantized when read."""
    fields = mxfp4_fields(tensors)
    if not fields:
        return tensors
    readers = {
        name: partial(_read_dequantized, tensors, name) for name in _quantized_names(tensors)
    }
    return OverlayArrays(
        LazyArrays(readers), ArraysView(tensors, [n for n in tensors if n not in fields])
    )


def dequantized_shapes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Shapes of a file's tensors after `dequantize_tensors`."""
    result = dict(shapes)
    for name in _quantized_names(shapes):
        if len(result[name + BLOCKS]) == 4:
            experts, outputs, blocks, halves = result.pop(name + BLOCKS)
            del result[name + SCALES]
            result[name] = (experts, 2 * halves * blocks, outputs)
    return result


def mxfp4_fields(names: Collection[str]) -> set[str]:
    """Selects the tensor names that are MXFP4 blocks or scales."""
    return {name + field for name in _quantized_names(names) for field in (BLOCKS, SCALES)}


def _quantized_names(names: Collection[str]) -> list[str]:
    """Names of the weights for which a file has MXFP4 blocks and scales."""
    stems = [n.removesuffix(BLOCKS) for n in names if n.endswith(BLOCKS)]
    return [stem for stem in stems if stem + SCALES in names]


def _read_dequantized(tensors: Arrays, name: str) -> np.ndarray:
    """Read and dequantize a weight: bfloat16 (experts, in features, out features)."""
    return dequantize_mxfp4(tensors[name + BLOCKS], tensors[name + SCALES]).swapaxes(1, 2)
