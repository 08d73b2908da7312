"""Quantized frozen weights of phases: stored in 4 or 8 bits, dequantized after loading.

A layer's graphs are the same as without quantization; while the layer runs, the device holds a
dequantized copy of its weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

import popxl
import popxl_addons as addons
from config.model import QuantConfig
from modelling.phases.settings import PhaseSettings
from popxl_addons.variable_factory import NamedVariableFactories, VariableFactory


class DequantSpec(NamedTuple):
    """Dtype of a dequantized weight, and the axis along which groups of it share a scale.

    Attributes:
        dtype: data type of the dequantized variable.
        axis: axis of the input features.
    """

    dtype: popxl.dtype
    axis: int


def quantize_factories(
    facts: NamedVariableFactories, phase: str, settings: PhaseSettings
) -> tuple[NamedVariableFactories, dict[str, DequantSpec]]:
    """Factories of what a phase stores: codes and scales in place of each quantized variable.

    Returns:
        Factories, of which a quantized variable has three (`QUANT_FIELDS`), and the quantized
        variables by name.
    """
    stored: dict[str, VariableFactory] = {}
    quantized: dict[str, DequantSpec] = {}
    for name, factory in facts.to_dict().items():
        quant = settings.quant_config(phase, name)
        if quant is None:
            stored[name] = factory
            continue
        from modelling.quantization import QUANT_DTYPES, QUANT_FIELDS, quantized_shapes

        axis = settings.weight_mapping(phase, name).input_axis
        quantized[name] = DequantSpec(factory.dtype, axis)
        shapes = quantized_shapes(factory.shape_on_replica, quant, axis)  # type: ignore[arg-type]
        for field, shape, dtype in zip(QUANT_FIELDS, shapes, QUANT_DTYPES, strict=True):
            zeros = np.broadcast_to(np.zeros((), dtype.as_numpy()), shape)
            group = factory.replica_grouping
            stored[f"{name}.{field}"] = VariableFactory(zeros, dtype, field, replica_grouping=group)
    return NamedVariableFactories.from_dict(stored), quantized


def dequantize_variables(
    stored: addons.NamedTensors, quantized: Mapping[str, DequantSpec], quant: QuantConfig
) -> addons.NamedTensors:
    """Dequantize the stored tensors that `quantized` names; return the others unchanged."""
    if not quantized:
        return stored
    from modelling.quantization import QUANT_FIELDS, dequantize_weight

    tensors = stored.to_dict()
    for name, (dtype, axis) in quantized.items():
        if f"{name}.{QUANT_FIELDS[0]}" in tensors:
            fields = [tensors.pop(f"{name}.{field}") for field in QUANT_FIELDS]
            tensors[name] = dequantize_weight(fields, quant, dtype, axis)
    return addons.NamedTensors.from_dict(tensors)
