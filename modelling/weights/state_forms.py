"""Optimizer state in the form that a run keeps, made of that of a checkpoint in another form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from checkpoints.arrays import Arrays, LazyArrays, Overlay, View
from config.optimizer_state import MASTER, RESIDUAL, RESIDUALS, SLOTS, Slot
from config.sections import RunConfig
from modelling.weights.logical import OPTIMIZER
from modelling.weights.table import WeightTable
from popxl.dtypes import dtype
from popxl_addons.optimizers import packed

_MOMENTS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "first_order": (packed.pack_first, packed.unpack_first),
    "second_order": (packed.pack_second, packed.unpack_second),
}
_PACKED = ("codes", "scales")
_WHOLE = (MASTER.name, RESIDUAL)


class Spec(Protocol):
    """What is known of a tensor in a file."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype: ...


@dataclass(frozen=True)
class KeptState:
    """A tensor of optimizer state.

    Attributes:
        weight: the logical weight that it belongs to.
        of: the shape of that weight, as Hugging Face turns it.
        axis: of that weight, along which groups of elements are packed together.
    """

    slot: Slot
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


def kept_state(config: RunConfig, table: WeightTable) -> dict[str, KeptState]:
    """All optimizer state of a run but the numbers of steps, by the names in checkpoints."""
    kept = {}
    for row in (row for row in table.rows if row.trained):
        for weight in row.weights:
            axis = 1 - row.uncut_axis if row.transpose else row.uncut_axis
            for slot in config.optimizer_slots(len(weight.shape), row.of_adapter):
                name = f"{OPTIMIZER}/{slot.name}/{weight.name}"
                kept[name] = KeptState(slot, weight.name, weight.shape, axis)
    return kept


def in_form(
    tensors: Arrays, specs: Mapping[str, Spec], kept: Mapping[str, KeptState], config: RunConfig
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
    forms = _Forms(tensors, specs, config.model.precision)
    made = {}
    for name in missing:
        maker = forms.maker(kept[name])
        if maker is None:
            return name
        made[name] = maker
    others = [n for n in specs if n not in made]
    if config.model.precision == "float32":
        made |= {n: partial(forms.weight, n) for n in forms.split_weights(others)}
    return Overlay(LazyArrays(made), View(tensors, others))


def whole_weight(tensors: Arrays, name: str) -> np.ndarray:
    """A weight in float32, with what is kept of it besides its 16 bits."""
    if _name(MASTER.name, name) in tensors:
        return tensors[_name(MASTER.name, name)]
    low = tensors[name]
    if _name(RESIDUAL, name) not in tensors:
        return low.astype(np.float32)
    whole: np.ndarray = packed.join(low, tensors[_name(RESIDUAL, name)])
    return whole


class _Forms:
    """Makes state of what a checkpoint has, one tensor at a time."""

    def __init__(self, tensors: Arrays, specs: Mapping[str, Spec], precision: str) -> None:
        self._tensors, self._specs, self._precision = tensors, specs, precision

    def maker(self, state: KeptState) -> Callable[[], np.ndarray] | None:
        """What makes a tensor; None if there is nothing to make it of."""
        if state.slot.name in _WHOLE:
            if not all(self._fits(name, state) for name in _WHOLE if self._is_kept(name, state)):
                return None
            if state.slot == MASTER:
                return partial(self.weight, state.weight)
            return partial(self._residual, state.weight, 8 * state.slot.itemsize)
        moment, _, part = state.slot.name.rpartition("_")
        if part in _PACKED and self._has(moment, state):
            return partial(self._packed, moment, _PACKED.index(part), state)
        if state.slot.name in _MOMENTS and self._has(state.slot.name, state):
            return partial(self._moment, state.slot.name, state.weight, state.axis)
        return None

    def split_weights(self, names: Sequence[str]) -> list[str]:
        """Weights of which more is kept than their 16 bits."""
        return [n for n in names if any(_name(slot, n) in self._specs for slot in _WHOLE)]

    def weight(self, name: str) -> np.ndarray:
        """A whole weight, float32."""
        return whole_weight(self._tensors, name)

    def _residual(self, weight: str, bits: int) -> np.ndarray:
        low = self._tensors[weight].astype(dtype.from_name(self._precision).as_numpy())
        residual: np.ndarray = packed.residual(self.weight(weight), low, bits)
        return residual

    def _has(self, moment: str, state: KeptState) -> bool:
        """Whether a checkpoint has a moment of a weight, in any form."""
        forms = [moment], [f"{moment}_{part}" for part in _PACKED]
        return any(
            all(self._is_kept(name, state) and self._fits(name, state) for name in form)
            for form in forms
        )

    def _is_kept(self, slot: str, state: KeptState) -> bool:
        """Whether a checkpoint keeps something of that name for the weight."""
        return _name(slot, state.weight) in self._specs

    def _fits(self, slot: str, state: KeptState) -> bool:
        """Whether what it keeps fits the weight."""
        spec = self._specs[_name(slot, state.weight)]
        kinds = RESIDUALS.values() if slot == RESIDUAL else (SLOTS[slot],)
        return any(replace(state, slot=kind).is_like(spec) for kind in kinds)

    def _moment(self, moment: str, weight: str, axis: int) -> np.ndarray:
        if _name(moment, weight) in self._specs:
            return self._tensors[_name(moment, weight)].astype(np.float32, copy=False)
        codes, scales = (self._tensors[_name(f"{moment}_{part}", weight)] for part in _PACKED)
        values: np.ndarray = _MOMENTS[moment][1](codes, scales.reshape(-1), _groups(codes, axis))
        return values

    def _packed(self, moment: str, part: int, state: KeptState) -> np.ndarray:
        values = self._moment(moment, state.weight, state.axis)
        made = _MOMENTS[moment][0](values, _groups(values, state.axis))[part]
        return np.reshape(made, state.shape)


def _groups(values: np.ndarray, axis: int) -> packed.Groups:
    groups = packed.Groups.along(axis, values.shape)
    assert groups is not None, "a whole tensor cuts no group"
    return groups


def _name(slot: str, weight: str) -> str:
    return f"{OPTIMIZER}/{slot}/{weight}"
