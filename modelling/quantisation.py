"""The weights of linear maps in 4 bits, which are not trained: a quarter of the memory of 16 bits.

Weight-only quantisation with a scale and a bias for each group of neighbouring input features, as
in GPTQ (Frantar et al., arXiv:2210.17323), but rounding each value to the nearest step: loading
needs no data. Activations stay as they are; a weight is decompressed where it is used.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

import popxl
from popxl import Variable
from popxl_addons import NamedTensors
from popxl_addons.ops.group_quantize_decompress import group_quantize_compress_numpy

PARTS = ("packed", "scale", "bias")
"""Names of the variables that stand for one weight; see `packed_shapes`."""
PART_DTYPES = (popxl.uint16, popxl.float16, popxl.float16)
PER_WORD = 4


def packed_shapes(
    shape: tuple[int, int], group_size: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Shapes of the parts of a weight (in features, out features).

    Returns:
        Of the packed values, uint16, four to a word; of scale and bias, float16.

    Raises:
        ValueError: the groups do not divide the input features, or are no whole words.
    """
    features, outputs = shape
    if features % group_size or group_size % PER_WORD:
        raise ValueError(
            f"{features} input features cannot be cut into groups of {group_size}: it must be a "
            f"multiple of {PER_WORD} that divides them"
        )
    groups = (outputs, features // group_size)
    return (*groups, group_size // PER_WORD), (*groups, 1), (*groups, 1)


def quantised(weight: np.ndarray, parts: NamedTensors) -> dict[Variable, np.ndarray]:
    """Host data of the variables of a weight in 4 bits.

    An element is off by half a step at most; a step is a fifteenth of the range of its group.

    Args:
        weight: float (..., in features, out features), such as one for each shard.
        parts: the variables `PARTS`.
    """
    size = parts.packed.shape[-1] * PER_WORD
    data = group_quantize_compress_numpy(weight, size, -2)
    return {parts.get(name): array for name, array in zip(PARTS, data, strict=True)}


class QuantisedParts:
    """The parts of a weight in 4 bits, which are made together and handed out one by one."""

    def __init__(self, whole: Callable[[], np.ndarray], parts: NamedTensors) -> None:
        self._whole, self._parts = whole, parts
        self._made: dict[Variable, np.ndarray] = {}
        self._lock = threading.Lock()

    @property
    def variables(self) -> list[Variable]:
        """The parts' variables."""
        return [v for v in self._parts.tensors if isinstance(v, Variable)]

    def of(self, variable: Variable) -> np.ndarray:
        """The data of one part."""
        with self._lock:
            if variable not in self._made:
                self._made = quantised(self._whole(), self._parts)
            return self._made.pop(variable)
