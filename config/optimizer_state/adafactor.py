"""Adafactor (Shazeer and Stern, arXiv:1804.04235)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from config.base import ConfigSection
from config.optimizer_state.state_slots import FIRST_MOMENT, SECOND_MOMENT, OptimizerSpec, StateSlot
from config.values import PositiveFloat, Probability

if TYPE_CHECKING:
    from config.training import Optimizer
    from popxl_addons import Module
    from popxl_addons.optimizers.adafactor import MatrixLayout


@dataclass(frozen=True)
class Adafactor(ConfigSection):
    """Settings of Adafactor, which replace AdamW's betas and eps; as in transformers' Adafactor."""

    beta1: Probability | None = None
    """Decay of the moving average of updates. null: no moving average."""

    decay_rate: PositiveFloat = 0.8
    """Exponent of the second moment's decay, 1 - step^-decay_rate. HF: its negative."""

    eps: PositiveFloat = 1e-30
    """Added to squared gradients. HF: eps[0]."""

    clip_threshold: PositiveFloat = 1.0
    """Maximum root mean square of an update, before the learning rate."""

    scale_parameter: bool = True
    """Multiply the learning rate by the root mean square of the weight."""

    min_scale: PositiveFloat = 1e-3
    """Minimum root mean square of a weight in scale_parameter. HF: eps[1]."""


FACTORED_SECOND_MOMENT = (replace(SECOND_MOMENT, per="row"), replace(SECOND_MOMENT, per="column"))


def _state_slots(optimizer: Optimizer, rank: int) -> tuple[StateSlot, ...]:
    mean = () if optimizer.adafactor.beta1 is None else (FIRST_MOMENT,)
    return mean + (FACTORED_SECOND_MOMENT if rank == 2 else (SECOND_MOMENT,))


def _make_update_module(
    optimizer: Optimizer, rank: int, matrix_layout: Callable[[], MatrixLayout]
) -> tuple[type[Module], dict[str, Any]]:
    """Build the Adafactor update of a variable, whose weights are matrices sharded or not."""
    from popxl_addons.optimizers.adafactor import AdafactorOptimizerStep

    settings = optimizer.adafactor
    return AdafactorOptimizerStep, {
        "beta1": settings.beta1,
        "decay_rate": -settings.decay_rate,
        "eps": (settings.eps, settings.min_scale),
        "clip_threshold": settings.clip_threshold,
        "scale_parameter": settings.scale_parameter,
        "matrix_layout": matrix_layout(),
    }


ADAFACTOR = OptimizerSpec(
    (FIRST_MOMENT, SECOND_MOMENT, *FACTORED_SECOND_MOMENT),
    _state_slots,
    _make_update_module,
    allows_shard_replicas=False,
)
