"""Frozen weights in few bits: packed in host memory and on the link, expanded once they are loaded.

So a layer's graphs are those of whole weights, bit for bit; there is an expanded copy of the
weights of a layer as long as it is at work.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

import popxl
import popxl_addons as addons
from config.model import FewBits
from modelling.phases.settings import Settings
from modelling.quantisation import PART_DTYPES, PARTS, packed_shapes, unpacked
from popxl_addons.variable_factory import NamedVariableFactories, VariableFactory


class Whole(NamedTuple):
    """What a packed variable is expanded to.

    Attributes:
        axis: that of the input features.
    """

    dtype: popxl.dtype
    axis: int


def packed(
    facts: NamedVariableFactories, phase: str, settings: Settings
) -> tuple[NamedVariableFactories, dict[str, Whole]]:
    """The factories of what a phase stores for its variables.

    Returns:
        Factories, three for a variable that is packed, and what these variables are, by name.
    """
    stored: dict[str, VariableFactory] = {}
    expanded: dict[str, Whole] = {}
    for name, factory in facts.to_dict().items():
        few_bits = settings.few_bits(phase, name)
        if few_bits is None:
            stored[name] = factory
            continue
        axis = settings.row(phase, name).input_axis
        expanded[name] = Whole(factory.dtype, axis)
        shapes = packed_shapes(factory.shape_on_replica, few_bits, axis)  # type: ignore[arg-type]
        for part, shape, dtype in zip(PARTS, shapes, PART_DTYPES, strict=True):
            zeros = np.broadcast_to(np.zeros((), dtype.as_numpy()), shape)
            group = factory.replica_grouping
            stored[f"{name}.{part}"] = VariableFactory(zeros, dtype, part, replica_grouping=group)
    return NamedVariableFactories.from_dict(stored), expanded


def expanded(
    stored: addons.NamedTensors, wholes: Mapping[str, Whole], few_bits: FewBits
) -> addons.NamedTensors:
    """Whole variables from what is stored; `wholes` are the packed ones."""
    tensors = stored.to_dict()
    for name, (dtype, axis) in wholes.items():
        if f"{name}.{PARTS[0]}" in tensors:
            parts = [tensors.pop(f"{name}.{part}") for part in PARTS]
            tensors[name] = unpacked(parts, few_bits, dtype, axis)
    return addons.NamedTensors.from_dict(tensors)
