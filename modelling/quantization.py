"""Weight-only quantization: frozen weights of linear layers in 4 or 8 bits.

Each group of neighbouring input features has a scale and a bias, as in GPTQ (Frantar et al.,
arXiv:2210.17323), but values are rounded to nearest: no calibration data is needed. Activations
keep their precision; a weight is dequantized where it is used.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

import popxl
from config.model import QuantConfig
from popxl import Tensor, Variable
from popxl_addons import NamedTensors
from popxl_addons.ops.group_quantize_decompress import (
    group_quantize_compress_numpy,
    group_quantize_decompress,
    group_quantize_decompress_numpy,
)

QUANT_FIELDS = ("packed", "scale", "bias")
"""Names of the variables of a quantized weight, see `quantized_shapes`."""
QUANT_DTYPES = (popxl.uint16, popxl.bfloat16, popxl.bfloat16)
_WORD_BITS = 16
_CHUNK_ELEMENTS = 2**22  # quantized at a time, to limit the memory of intermediate results


def quantized_shapes(
    shape: tuple[int, int], quant: QuantConfig, axis: int = 0
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Returns the shapes of a quantized weight's variables (codes and scales).

    Args:
        shape: of the weight.
        axis: of the input features.

    Returns:
        Of the packed values, uint16 (outputs, groups, words of a group), four or two values to a
        word; of scale and bias, bfloat16 (outputs, groups, 1).

    Raises:
        ValueError: groups do not divide the input features, or are no whole number of words.
    """
    features, outputs = shape[axis], shape[1 - axis]
    group_size, values_per_word = quant.group_size, _WORD_BITS // quant.bits
    if features % group_size or group_size % values_per_word:
        raise ValueError(
            f"{features} input features cannot be cut into groups of {group_size}: it must be a "
            f"multiple of {values_per_word} that divides them"
        )
    groups = (outputs, features // group_size)
    return (*groups, group_size // values_per_word), (*groups, 1), (*groups, 1)


def dequantize_weight(
    fields: Sequence[Tensor], quant: QuantConfig, dtype: popxl.dtype, axis: int = 0
) -> Tensor:
    """Dequantizes a weight in a graph, from tensors in the order of `QUANT_FIELDS`.

    The result is (in features, out features), or its transpose with axis 1.

    Args:
        dtype: of the result.
        axis: of the input features.
    """
    packed, scale, bias = fields
    return group_quantize_decompress(packed, scale, bias, axis, quant.bits, dtype)


def quantize_weight(weight: np.ndarray, variables: NamedTensors, axis: int = 0) -> list[np.ndarray]:
    """Quantizes a weight on the host, to arrays in the order of `QUANT_FIELDS`.

    The error of an element is at most half a step. A step is 1/15 of the range of its group in 4
    bits, 1/255 in 8, and up to 1.6 % more if a group has values of both signs, see
    `group_quantize_compress_numpy`.

    Args:
        weight: float (..., in features, out features), with an axis for the shards, if any.
        variables: `QUANT_FIELDS` by name, which give the number of bits and the group size.
        axis: 1: weight is (..., out features, in features).
    """
    _, groups, packed_size = variables.packed.shape[-3:]
    features, outputs = axis - 2, -1 - axis
    group_size = weight.shape[features] // groups
    quant = QuantConfig(packed_size * _WORD_BITS // group_size, group_size)
    chunks = np.array_split(weight, -(-weight.size // _CHUNK_ELEMENTS), outputs)
    quantized = [_quantize_chunk(chunk, quant, features) for chunk in chunks]
    return [np.concatenate(field, -3) for field in zip(*quantized, strict=True)]


def fake_quantize(weight: np.ndarray, quant: QuantConfig) -> np.ndarray:
    """Rounds a weight to its quantized values: (out features, in features) -> float32."""
    fields = _quantize_chunk(weight, quant, -1)
    rounded: np.ndarray = group_quantize_decompress_numpy(*fields, bits=quant.bits)
    return rounded


def _quantize_chunk(
    weight: np.ndarray, quant: QuantConfig, axis: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    bits, group_size = quant
    scale_dtype = QUANT_DTYPES[1].as_numpy()
    return group_quantize_compress_numpy(weight, group_size, axis, bits, scale_dtype)


@runtime_checkable
class QuantizedWeightCache(Protocol):
    """Interface: tensors that cache the quantized form of some of them on the host."""

    def get_quantized(
        self,
        names: Sequence[str],
        key: str,
        compute: Callable[[Mapping[str, np.ndarray]], Sequence[np.ndarray]],
    ) -> Sequence[np.ndarray]:
        """Returns the cached arrays of `key`, or computes and caches them from tensors `names`.

        Args:
            key: everything besides the tensors' bytes that the arrays depend on.
        """


class QuantizedWeight:
    """Host data of a quantized weight: codes and scales, computed together, taken one by one.

    Args:
        compute: returns the data in the order of `QUANT_FIELDS`.
        variables: `QUANT_FIELDS` by name.
    """

    def __init__(
        self, compute: Callable[[], Sequence[np.ndarray]], variables: NamedTensors
    ) -> None:
        self._compute, self._variables = compute, variables
        self._data: dict[Variable, np.ndarray] = {}
        self._lock = threading.Lock()

    @property
    def variables(self) -> list[Variable]:
        """The quantized weight's variables, in the order of `QUANT_FIELDS`."""
        return [self._variables.get(name) for name in QUANT_FIELDS]

    def pop_data(self, variable: Variable) -> np.ndarray:
        """Returns the host data of one variable, and drops it from this object."""
        with self._lock:
            if variable not in self._data:
                self._data = dict(zip(self.variables, self._compute(), strict=True))
            return self._data.pop(variable)
