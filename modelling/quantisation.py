"""The weights of linear maps in 4 or 8 bits, which are not trained.

Weight-only quantization with a scale and a bias for each group of neighbouring input features, as
in GPTQ (Frantar et al., arXiv:2210.17323), but rounding each value to the nearest step: loading
needs no data. Activations stay as they are; a weight is decompressed where it is used.
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
"""Names of the variables that stand for one weight; see `quantized_shapes`."""
QUANT_DTYPES = (popxl.uint16, popxl.bfloat16, popxl.bfloat16)
_WORD = 16  # bits
_AT_ONCE = 2**22  # elements that are quantised at a time, whose steps take memory


def quantized_shapes(
    shape: tuple[int, int], quant: QuantConfig, axis: int = 0
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Shapes of the parts of a weight.

    Args:
        shape: of the weight; `axis` is that of its input features.

    Returns:
        Of the packed values, uint16, four or two to a word; of scale and bias, bfloat16.

    Raises:
        ValueError: the groups do not divide the input features, or are no whole words.
    """
    features, outputs = shape[axis], shape[1 - axis]
    size, in_a_word = quant.group_size, _WORD // quant.bits
    if features % size or size % in_a_word:
        raise ValueError(
            f"{features} input features cannot be cut into groups of {size}: it must be a "
            f"multiple of {in_a_word} that divides them"
        )
    groups = (outputs, features // size)
    return (*groups, size // in_a_word), (*groups, 1), (*groups, 1)


def dequantize(
    parts: Sequence[Tensor], quant: QuantConfig, dtype: popxl.dtype, axis: int = 0
) -> Tensor:
    """The weight that `QUANT_FIELDS` stand for, whose input features are along `axis`."""
    words, scale, bias = parts
    return group_quantize_decompress(words, scale, bias, axis, quant.bits, dtype)


def quantize(weight: np.ndarray, parts: NamedTensors, axis: int = 0) -> list[np.ndarray]:
    """Host data of the variables of a packed weight, in the order of `QUANT_FIELDS`.

    An element is off by half a step at most; a step is a fifteenth of the range of its group in 4
    bits, a 255th in 8, and 1.6 % more at most where a group has numbers of both signs, see
    `group_quantize_compress_numpy`.

    Args:
        weight: float (..., in features, out features), such as one for each shard.
        parts: the variables `QUANT_FIELDS`.
        axis: 1: it is (..., out features, in features).
    """
    _, groups, words = parts.packed.shape[-3:]
    features, outputs = axis - 2, -1 - axis
    size = weight.shape[features] // groups
    cuts = np.array_split(weight, -(-weight.size // _AT_ONCE), outputs)
    bits = words * _WORD // size
    made = [_compressed(cut, QuantConfig(bits, size), features) for cut in cuts]
    return [np.concatenate(each, -3) for each in zip(*made, strict=True)]


def fake_quantize(weight: np.ndarray, quant: QuantConfig) -> np.ndarray:
    """What is left of a weight (out features, in features), float32."""
    parts = _compressed(weight, quant, -1)
    left: np.ndarray = group_quantize_decompress_numpy(*parts, bits=quant.bits)
    return left


def _compressed(
    weight: np.ndarray, quant: QuantConfig, axis: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    bits, size = quant
    of_parts = QUANT_DTYPES[1].as_numpy()
    return group_quantize_compress_numpy(weight, size, axis, bits, of_parts)


@runtime_checkable
class CachesQuantized(Protocol):
    """Tensors that keep what became of some of them when they were packed."""

    def packed(
        self,
        names: Sequence[str],
        form: str,
        make: Callable[[Mapping[str, np.ndarray]], Sequence[np.ndarray]],
    ) -> Sequence[np.ndarray]:
        """The arrays that `make` makes of the tensors `names`, or made of equal ones before.

        Args:
            form: all that the arrays depend on besides the tensors' bytes.
        """


class QuantizedWeight:
    """The parts of a packed weight, which are made together and handed out one by one."""

    def __init__(self, make: Callable[[], Sequence[np.ndarray]], parts: NamedTensors) -> None:
        """Args: `make`: makes their data, in the order of `QUANT_FIELDS`."""
        self._make, self._parts = make, parts
        self._made: dict[Variable, np.ndarray] = {}
        self._lock = threading.Lock()

    @property
    def variables(self) -> list[Variable]:
        """The parts' variables."""
        return [self._parts.get(name) for name in QUANT_FIELDS]

    def of(self, variable: Variable) -> np.ndarray:
        """The data of one part."""
        with self._lock:
            if variable not in self._made:
                self._made = dict(zip(self.variables, self._make(), strict=True))
            return self._made.pop(variable)
