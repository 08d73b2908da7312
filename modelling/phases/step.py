"""What all phases of an optimizer step are given; loops over layers pass it on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import popxl


@dataclass(frozen=True)
class Update:
    """What an optimizer update takes besides gradients and state; float32 scalars.

    Attributes:
        norm: global norm of the unscaled gradients; not finite: the update changes nothing.
        rate: learning rate.
    """

    norm: popxl.Tensor
    rate: popxl.Tensor

    @property
    def tensors(self) -> list[popxl.Tensor]:
        """All of it, as a graph takes it."""
        return [self.norm, self.rate]


@dataclass(frozen=True)
class StepInputs:
    """
    Attributes:
        seed: of dropout; None: nothing is random.
        update: that of the step before, which each layer does where the step first needs its
            variables; None: nothing is pending.
    """

    seed: popxl.Tensor | None = None
    update: Update | None = None

    @property
    def tensors(self) -> list[popxl.Tensor]:
        """All of it, as a graph takes it."""
        seed = [] if self.seed is None else [self.seed]
        return seed if self.update is None else [*seed, *self.update.tensors]

    def of(self, tensors: Sequence[popxl.Tensor]) -> StepInputs:
        """These inputs in another graph, from their `tensors` there."""
        given = list(tensors)
        seed = None if self.seed is None else given.pop(0)
        return StepInputs(seed, None if self.update is None else Update(*given))
