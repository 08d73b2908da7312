"""Adafactor (Shazeer and Stern, arXiv:1804.04235)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from config.base import Section
from config.optimizer_state.slots import FIRST, SECOND, OptimizerRecord, Slot
from config.values import PositiveFloat, Probability

if TYPE_CHECKING:
    from config.run import Optimizer
    from popxl_addons import Module
    from popxl_addons.optimizers.adafactor import Whole


@dataclass(frozen=True)
class Adafactor(Section):
    """What Adafactor has in place of AdamW's betas and eps. HF: transformers' Adafactor."""

    beta1: Probability | None = None
    """Decay per step of the mean of the updates. null: none is kept."""

    decay_rate: PositiveFloat = 0.8
    """The mean of the squared gradients decays by 1 - step^-decay_rate. HF: its negative."""

    eps: PositiveFloat = 1e-30
    """Added to squared gradients. HF: eps[0]."""

    clip_threshold: PositiveFloat = 1.0
    """Largest root mean square of an update, before the learning rate."""

    scale_parameter: bool = True
    """Multiply the learning rate by the root mean square of the weight."""

    least_scale: PositiveFloat = 1e-3
    """Least root mean square that a weight counts as. HF: eps[1]."""


FACTORS = (replace(SECOND, over="rows"), replace(SECOND, over="columns"))


def _keeps(optimizer: Optimizer, rank: int) -> tuple[Slot, ...]:
    mean = () if optimizer.adafactor.beta1 is None else (FIRST,)
    return mean + (FACTORS if rank == 2 else (SECOND,))


def _step(
    optimizer: Optimizer, rank: int, whole: Callable[[], Whole]
) -> tuple[type[Module], dict[str, Any]]:
    """Each weight of a variable counts as a matrix of its own, whether it is sharded or not."""
    from popxl_addons.optimizers.adafactor import AdafactorOptimizerStep

    own = optimizer.adafactor
    return AdafactorOptimizerStep, {
        "beta1": own.beta1,
        "decay_rate": -own.decay_rate,
        "eps": (own.eps, own.least_scale),
        "clip_threshold": own.clip_threshold,
        "scale_parameter": own.scale_parameter,
        "whole": whole(),
    }


ADAFACTOR = OptimizerRecord((FIRST, SECOND, *FACTORS), _keeps, _step, shared_parts=False)
