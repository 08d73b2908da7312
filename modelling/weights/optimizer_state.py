"""Optimizer state in the form that a run keeps, made of that of a checkpoint in another form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from checkpoints.arrays import Arrays, LazyArrays, Overlay, View
from config.optimizer_state import MASTER_WEIGHT, RESIDUAL, RESIDUAL_SLOTS, STATE_SLOTS, StateSlot
from config.sections import RunConfig
from modelling.weights.variables import OPTIMIZER
from modelling.weights.weight_map import WeightMap
from popxl.dtypes import dtype
from popxl_addons.optimizers import state_8bit

_MOMENTS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "first_order": (state_8bit.quantize_first_moment, state_8bit.dequantize_first_moment),
    "second_order": (state_8bit.quantize_second_moment, state_8bit.dequantize_second_moment),
}
_PACKED = ("codes", "scales")
_WHOLE = (MASTER_WEIGHT.name, RESIDUAL)


class Spec(Protocol):
    """What is known of a tensor in a file."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype: ...


@dataclass(frozen=True)
class OptimizerStateSpec:
    """A tensor of optimizer state.

    Attributes:
        weight: the logical weight that it belongs to.
        of: the shape of that weight, as Hugging Face turns it.
        axis: of that weight, along which groups of elements are packed together.
    """

    slot: StateSlot
    weight: str
    of: tuple[int, ...]
    axis: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's."""
        return self.slot.shape(self.of, self.axis)

    def is_like(self, spec: Spec) -> bool:
        """Whether a file has it so. Any type of floating point is as good as another."""
        theirs = np.dtype(spec.dtype).name
        floats = "float" in theirs and "float" in self.slot.dtype
        return spec.shape == self.shape and (floats or theirs == self.slot.dtype)


def optimizer_state_specs(
    config: RunConfig, weight_map: WeightMap
) -> dict[str, OptimizerStateSpec]:
    """All optimizer state of a run but the numbers of steps, by the names in checkpoints."""
    kept = {}
    for mapping in (mapping for mapping in weight_map.mappings if mapping.is_updated):
        for weight in mapping.weights:
            axis = 1 - mapping.unsharded_axis if mapping.transpose else mapping.unsharded_axis
            for slot in config.optimizer_slots(len(weight.shape), mapping.is_adapter):
                name = f"{OPTIMIZER}/{slot.name}/{weight.name}"
                kept[name] = OptimizerStateSpec(slot, weight.name, weight.shape, axis)
    return kept


def convert_optimizer_state(
    tensors: Arrays,
    specs: Mapping[str, Spec],
    kept: Mapping[str, OptimizerStateSpec],
    config: RunConfig,
) -> Arrays | str:
    """The tensors of a checkpoint, with optimizer state as a run keeps it.

    Moments are expanded or packed, residuals made of masters and the reverse. What is kept in fewer
    bits than before is rounded, the rest is exact.

    Args:
        specs: of all tensors.

    Returns:
        The same tensors if nothing changes, or the name of a tensor that cannot be made.
    """
    missing = [n for n, state in kept.items() if n not in specs or not state.is_like(specs[n])]
    if not missing:
        return tensors
    made: dict[str, Callable[[], np.ndarray]] = {}
    for name in missing:
        maker = _maker(kept[name], tensors, specs, config.model.precision)
        if maker is None:
            return name
        made[name] = maker
    others = [n for n in specs if n not in made]
    if config.model.precision == "float32":
        split = [n for n in others if any(_name(slot, n) in specs for slot in _WHOLE)]
        made |= {n: partial(float32_weight, tensors, n) for n in split}
    return Overlay(LazyArrays(made), View(tensors, others))


def float32_weight(tensors: Arrays, name: str) -> np.ndarray:
    """A weight in float32, with what is kept of it besides its 16 bits."""
    if _name(MASTER_WEIGHT.name, name) in tensors:
        return tensors[_name(MASTER_WEIGHT.name, name)]
    low = tensors[name]
    if _name(RESIDUAL, name) not in tensors:
        return low.astype(np.float32)
    whole: np.ndarray = state_8bit.join_weight(low, tensors[_name(RESIDUAL, name)])
    return whole


def _maker(
    state: OptimizerStateSpec, tensors: Arrays, specs: Mapping[str, Spec], precision: str
) -> Callable[[], np.ndarray] | None:
    """The function that makes state of a checkpoint's tensors; None if they do not suffice."""
    name, weight = state.slot.name, state.weight

    def is_kept(slot: str) -> bool:
        return _name(slot, weight) in specs

    def fits(slot: str) -> bool:
        kinds = RESIDUAL_SLOTS.values() if slot == RESIDUAL else (STATE_SLOTS[slot],)
        spec = specs[_name(slot, weight)]
        return any(replace(state, slot=kind).is_like(spec) for kind in kinds)

    if name in _WHOLE:
        if not all(fits(slot) for slot in _WHOLE if is_kept(slot)):
            return None
        if state.slot == MASTER_WEIGHT:
            return partial(float32_weight, tensors, weight)
        return partial(_residual, tensors, weight, precision, 8 * state.slot.itemsize)
    moment, _, part = name.rpartition("_")
    if part not in _PACKED:
        moment, part = name, ""
    forms = [moment], [f"{moment}_{part}" for part in _PACKED]
    if moment not in _MOMENTS or not any(
        all(is_kept(slot) and fits(slot) for slot in form) for form in forms
    ):
        return None
    values = partial(_moment, tensors, moment, weight, state.axis)
    return partial(_packed, values, moment, part, state) if part else values


def _residual(tensors: Arrays, weight: str, precision: str, bits: int) -> np.ndarray:
    low = tensors[weight].astype(dtype.from_name(precision).as_numpy())
    residual: np.ndarray = state_8bit.quantize_residual(float32_weight(tensors, weight), low, bits)
    return residual


def _moment(tensors: Arrays, moment: str, weight: str, axis: int) -> np.ndarray:
    """A moment in float32, of whichever form there is."""
    if _name(moment, weight) in tensors:
        return tensors[_name(moment, weight)].astype(np.float32, copy=False)
    codes, scales = (tensors[_name(f"{moment}_{part}", weight)] for part in _PACKED)
    values: np.ndarray = _MOMENTS[moment][1](codes, scales.reshape(-1), _quant_blocks(codes, axis))
    return values


def _packed(
    read: Callable[[], np.ndarray], moment: str, part: str, state: OptimizerStateSpec
) -> np.ndarray:
    values = read()
    made = _MOMENTS[moment][0](values, _quant_blocks(values, state.axis))[_PACKED.index(part)]
    return np.reshape(made, state.shape)


def _quant_blocks(values: np.ndarray, axis: int) -> state_8bit.QuantBlocks:
    groups = state_8bit.QuantBlocks.along_axis(axis, values.shape)
    assert groups is not None, "a whole tensor cuts no group"
    return groups


def _name(slot: str, weight: str) -> str:
    return f"{OPTIMIZER}/{slot}/{weight}"
