"""Conversion of a checkpoint's optimizer state to the precision that a run uses.

Forms differ in the precision of moments (8-bit, 16-bit, float32), and in master weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from checkpoints.lazy_arrays import Arrays, ArraysView, LazyArrays, OverlayArrays
from config.optimizer_state import MASTER_WEIGHT, RESIDUAL, RESIDUAL_SLOTS, STATE_SLOTS, StateSlot
from config.sections import RunConfig
from modelling.weights.variables import OPTIMIZER_PREFIX
from modelling.weights.weight_map import WeightMap
from popxl.dtypes import dtype
from popxl_addons.optimizers import state_8bit

_MOMENTS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "first_order": (state_8bit.quantize_first_moment, state_8bit.dequantize_first_moment),
    "second_order": (state_8bit.quantize_second_moment, state_8bit.dequantize_second_moment),
}
_8BIT_FIELDS = ("codes", "scales")
_MASTER_SLOTS = (MASTER_WEIGHT.name, RESIDUAL)


class FileTensorSpec(Protocol):
    """Interface: shape and dtype of a tensor in a checkpoint file."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype: ...


@dataclass(frozen=True)
class OptimizerStateSpec:
    """Specification of one optimizer state tensor: state slot (such as a moment) and its weight.

    Attributes:
        weight: name of the logical weight.
        weight_shape: shape of the logical weight.
        axis: axis of the weight along which elements share quantization blocks.
    """

    slot: StateSlot
    weight: str
    weight_shape: tuple[int, ...]
    axis: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the optimizer state tensor."""
        return self.slot.shape(self.weight_shape, self.axis)

    def matches_spec(self, spec: FileTensorSpec) -> bool:
        """True if a file's tensor has this shape and dtype; all floating dtypes match."""
        dtype_name = np.dtype(spec.dtype).name
        both_float = "float" in dtype_name and "float" in self.slot.dtype
        return spec.shape == self.shape and (both_float or dtype_name == self.slot.dtype)


def optimizer_state_specs(
    config: RunConfig, weight_map: WeightMap
) -> dict[str, OptimizerStateSpec]:
    """Specs of a program's optimizer state, except step counters, by name in checkpoints."""
    state_specs = {}
    for mapping in (mapping for mapping in weight_map.mappings if mapping.is_updated):
        for weight in mapping.weights:
            axis = 1 - mapping.unsharded_axis if mapping.transpose else mapping.unsharded_axis
            for slot in config.optimizer_slots(len(weight.shape), mapping.is_adapter):
                name = f"{OPTIMIZER_PREFIX}/{slot.name}/{weight.name}"
                state_specs[name] = OptimizerStateSpec(slot, weight.name, weight.shape, axis)
    return state_specs


def convert_optimizer_state(
    tensors: Arrays,
    specs: Mapping[str, FileTensorSpec],
    state_specs: Mapping[str, OptimizerStateSpec],
    config: RunConfig,
) -> Arrays | str:
    """Convert a checkpoint's tensors to the optimizer state of a run.

    Moments are quantized or dequantized; residuals and master weights are converted into each
    other. Values that get fewer bits are rounded, all others are exact.

    Args:
        specs: specs of all tensors of the checkpoint.
        state_specs: specifications of the run's optimizer state.

    Returns:
        The same tensors if nothing changes, or the name of a tensor that cannot be computed.
    """
    missing = [n for n, s in state_specs.items() if n not in specs or not s.matches_spec(specs[n])]
    if not missing:
        return tensors
    converters: dict[str, Callable[[], np.ndarray]] = {}
    for name in missing:
        converter = _make_state_converter(state_specs[name], tensors, specs, config.model.precision)
        if converter is None:
            return name
        converters[name] = converter
    unchanged = [n for n in specs if n not in converters]
    if config.model.precision == "float32":
        weights = [
            n
            for n in unchanged
            if any(_state_tensor_name(slot, n) in specs for slot in _MASTER_SLOTS)
        ]
        converters |= {n: partial(float32_weight, tensors, n) for n in weights}
    return OverlayArrays(LazyArrays(converters), ArraysView(tensors, unchanged))


def float32_weight(tensors: Arrays, name: str) -> np.ndarray:
    """Read a weight in float32: its master weight, or 16-bit weight plus rounding residual."""
    if _state_tensor_name(MASTER_WEIGHT.name, name) in tensors:
        return tensors[_state_tensor_name(MASTER_WEIGHT.name, name)]
    rounded = tensors[name]
    if _state_tensor_name(RESIDUAL, name) not in tensors:
        return rounded.astype(np.float32)
    weight: np.ndarray = state_8bit.join_weight(
        rounded, tensors[_state_tensor_name(RESIDUAL, name)]
    )
    return weight


def _make_state_converter(
    state: OptimizerStateSpec, tensors: Arrays, specs: Mapping[str, FileTensorSpec], precision: str
) -> Callable[[], np.ndarray] | None:
    """Returns the function that computes an optimizer state tensor; None if inputs are missing."""
    name, weight = state.slot.name, state.weight

    def is_saved(slot: str) -> bool:
        return _state_tensor_name(slot, weight) in specs

    def is_valid(slot: str) -> bool:
        variants = RESIDUAL_SLOTS.values() if slot == RESIDUAL else (STATE_SLOTS[slot],)
        spec = specs[_state_tensor_name(slot, weight)]
        return any(replace(state, slot=variant).matches_spec(spec) for variant in variants)

    if name in _MASTER_SLOTS:
        if not all(is_valid(slot) for slot in _MASTER_SLOTS if is_saved(slot)):
            return None
        if state.slot == MASTER_WEIGHT:
            return partial(float32_weight, tensors, weight)
        return partial(_compute_residual, tensors, weight, precision, 8 * state.slot.itemsize)
    moment, _, field = name.rpartition("_")
    if field not in _8BIT_FIELDS:
        moment, field = name, ""
    forms = [moment], [f"{moment}_{field}" for field in _8BIT_FIELDS]
    if moment not in _MOMENTS or not any(
        all(is_saved(slot) and is_valid(slot) for slot in form) for form in forms
    ):
        return None
    read = partial(_read_moment, tensors, moment, weight, state.axis)
    return partial(_quantize_moment, read, moment, field, state) if field else read


def _compute_residual(tensors: Arrays, weight: str, precision: str, bits: int) -> np.ndarray:
    """Compute the residual of rounding a float32 weight to 16 bits: int8 or int16."""
    rounded = tensors[weight].astype(dtype.from_name(precision).as_numpy())
    residual: np.ndarray = state_8bit.quantize_residual(
        float32_weight(tensors, weight), rounded, bits
    )
    return residual


def _read_moment(tensors: Arrays, moment: str, weight: str, axis: int) -> np.ndarray:
    """Read an optimizer moment, stored in float or 8-bit form, as float32."""
    if _state_tensor_name(moment, weight) in tensors:
        return tensors[_state_tensor_name(moment, weight)].astype(np.float32, copy=False)
    codes, scales = (
        tensors[_state_tensor_name(f"{moment}_{field}", weight)] for field in _8BIT_FIELDS
    )
    values: np.ndarray = _MOMENTS[moment][1](
        codes, scales.reshape(-1), _make_quant_blocks(codes, axis)
    )
    return values


def _quantize_moment(
    read: Callable[[], np.ndarray], moment: str, field: str, state: OptimizerStateSpec
) -> np.ndarray:
    """Quantize an optimizer moment to 8 bits; returns the field `field`: codes or scales."""
    values = read()
    codes_and_scales = _MOMENTS[moment][0](values, _make_quant_blocks(values, state.axis))
    return np.reshape(codes_and_scales[_8BIT_FIELDS.index(field)], state.shape)


def _make_quant_blocks(values: np.ndarray, axis: int) -> state_8bit.QuantBlocks:
    """Quantization blocks along an axis of a full (unsharded) optimizer moment."""
    blocks = state_8bit.QuantBlocks.along_axis(axis, values.shape)
    assert blocks is not None, "a full tensor splits no block"
    return blocks


def _state_tensor_name(slot: str, weight: str) -> str:
    """Name of an optimizer state tensor in checkpoints."""
    return f"{OPTIMIZER_PREFIX}/{slot}/{weight}"
