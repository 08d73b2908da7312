"""Trees of named tensors, and of named host arrays."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

import popxl
from popxl import ops
from popxl_addons.dot_tree import DotTree

TensorMap = Mapping[popxl.Tensor, popxl.Tensor]


class NamedTensorData(DotTree[np.ndarray]):
    """A tree of host arrays by name."""


class NamedTensors(DotTree[popxl.Tensor]):
    """A tree of tensors by name."""

    @property
    def tensors(self) -> tuple[popxl.Tensor, ...]:
        """Return all tensors, sorted by tensor name."""
        return tuple(sorted(self.values_flat(), key=lambda t: t.name))

    @property
    def named_tensors(self) -> dict[str, popxl.Tensor]:
        """Return all tensors by dotted name."""
        return self.to_dict()

    def remap(self, mapping: TensorMap) -> NamedTensors:
        """Replace each tensor by its value in `mapping`; KeyError if one is missing."""
        return self.map(lambda t: mapping[t])


def print_named_tensors(named_tensors: NamedTensors) -> NamedTensors:
    """Print each tensor with its name at run time; returns the printed tensors."""
    names, tensors = named_tensors.unpack()
    printed = [ops.print_tensor(t, name) for name, t in zip(names, tensors, strict=True)]
    return NamedTensors.pack(names, printed)
