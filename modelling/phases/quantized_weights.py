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
from config.model import QuantConfig
from modelling.phases.settings import PhaseSettings
from modelling.quantisation import QUANT_DTYPES, QUANT_FIELDS, dequantize, quantized_shapes
from popxl_addons.variable_factory import NamedVariableFactories, VariableFactory


class DequantSpec(NamedTuple):
    """What a packed variable is expanded to.

    Attributes:
        axis: that of the input features.
    """

    dtype: popxl.dtype
    axis: int


def quantize_factories(
    facts: NamedVariableFactories, phase: str, settings: PhaseSettings
) -> tuple[NamedVariableFactories, dict[str, DequantSpec]]:
    """The factories of what a phase stores for its variables.

    Returns:
        Factories, three for a variable that is packed, and what these variables are, by name.
    """
    stored: dict[str, VariableFactory] = {}
    dequantize_variables: dict[str, DequantSpec] = {}
    for name, factory in facts.to_dict().items():
        quant = settings.quant(phase, name)
        if quant is None:
            stored[name] = factory
            continue
        axis = settings.mapping(phase, name).input_axis
        dequantize_variables[name] = DequantSpec(factory.dtype, axis)
        shapes = quantized_shapes(factory.shape_on_replica, quant, axis)  # type: ignore[arg-type]
        for part, shape, dtype in zip(QUANT_FIELDS, shapes, QUANT_DTYPES, strict=True):
            zeros = np.broadcast_to(np.zeros((), dtype.as_numpy()), shape)
            group = factory.replica_grouping
            stored[f"{name}.{part}"] = VariableFactory(zeros, dtype, part, replica_grouping=group)
    return NamedVariableFactories.from_dict(stored), dequantize_variables


def dequantize_variables(
    stored: addons.NamedTensors, wholes: Mapping[str, DequantSpec], quant: QuantConfig
) -> addons.NamedTensors:
    """Whole variables from what is stored; `wholes` are the packed ones."""
    tensors = stored.to_dict()
    for name, (dtype, axis) in wholes.items():
        if f"{name}.{QUANT_FIELDS[0]}" in tensors:
            parts = [tensors.pop(f"{name}.{part}") for part in QUANT_FIELDS]
            tensors[name] = dequantize(parts, quant, dtype, axis)
    return addons.NamedTensors.from_dict(tensors)
