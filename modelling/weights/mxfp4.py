"""Weights in files in MXFP4: 4 bits each, with a power of two for 32 neighbours.

The format is the Open Compute Project's, Microscaling Formats 1.0. gpt-oss has its experts so, as
`<name>_blocks`, uint8 (experts, out features, blocks, 16), two values to a byte, the lower half
first, and `<name>_scales`, uint8 (experts, out features, blocks). transformers expands them when it
loads them, to `<name>` (experts, in features, out features).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial

import ml_dtypes
import numpy as np

from checkpoints.arrays import Arrays, LazyArrays, Overlay, View
from modelling.weights.mapping import WeightsError

BLOCKS, SCALES = "_blocks", "_scales"
VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
"""What the lower three of the four bits mean; the highest is the sign."""
BIAS = 127


def expand(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The values (experts, out features, in features), bfloat16, which are exact."""
    if blocks.shape[:-1] != scales.shape:
        raise WeightsError(
            f"the model's file is damaged: it has blocks {blocks.shape} with scales {scales.shape}"
        )
    experts, outputs, groups, halves = blocks.shape
    values = np.empty((experts, outputs, 2 * halves * groups), ml_dtypes.bfloat16)
    for expert in range(experts):  # one at a time: what is between takes several times their bytes
        values[expert] = _expanded(blocks[expert], scales[expert]).reshape(outputs, -1)
    return values


def _expanded(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    of_bits = np.concatenate([VALUES, -VALUES])
    pairs = np.stack([of_bits[blocks & 15], of_bits[blocks >> 4]], -1)
    with np.errstate(over="ignore", invalid="ignore"):  # a scale of 255 is not a number
        found: np.ndarray = np.ldexp(pairs, scales.astype(np.int32)[..., None, None] - BIAS)
    return found


def without_blocks(tensors: Arrays) -> Arrays:
    """The tensors of a file with those in MXFP4 expanded, when they are asked for."""
    parts = parts_of_blocks(tensors)
    if not parts:
        return tensors
    expanded = LazyArrays({name: partial(_whole, tensors, name) for name in _packed(tensors)})
    return Overlay(expanded, View(tensors, [n for n in tensors if n not in parts]))


def shapes_without_blocks(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The shapes of `without_blocks`."""
    found = dict(shapes)
    for name in _packed(shapes):
        if len(found[name + BLOCKS]) == 4:
            experts, outputs, blocks, halves = found.pop(name + BLOCKS)
            del found[name + SCALES]
            found[name] = (experts, 2 * halves * blocks, outputs)
    return found


def parts_of_blocks(names: Collection[str]) -> set[str]:
    """Those of a file's names that are blocks and their scales."""
    return {name + part for name in _packed(names) for part in (BLOCKS, SCALES)}


def _packed(names: Collection[str]) -> list[str]:
    stems = [n.removesuffix(BLOCKS) for n in names if n.endswith(BLOCKS)]
    return [stem for stem in stems if stem + SCALES in names]


def _whole(tensors: Arrays, name: str) -> np.ndarray:
    return expand(tensors[name + BLOCKS], tensors[name + SCALES]).swapaxes(1, 2)
