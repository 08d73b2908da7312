"""Inputs that all phases of an optimizer step take; loops over layers hand them on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import popxl


@dataclass(frozen=True)
class UpdateInputs:
    """What an optimizer update takes besides gradients and state; float32 scalars.

    Attributes:
        norm: global norm of the unscaled gradients; not finite: the update changes nothing.
        rate: learning rate.
    """

    norm: popxl.Tensor
    lr: popxl.Tensor

    @property
    def tensors(self) -> list[popxl.Tensor]:
        """All of it, as a graph takes it."""
        return [self.norm, self.lr]


@dataclass(frozen=True)
class StepInputs:
    """Inputs of one pass of micro-batches through all layers.

    Attributes:
        seed: of dropout, the step's, uint32 (2,); None: nothing is random.
        update: that of the step before, which each layer does where the step first needs its
            variables; None: nothing is pending.
        first_micro_batch: number in the step of the pass's first micro-batch, int32 scalar; None:
            the step has one pass.
        is_first, is_last: which pass of the step it is. Sums of gradients start from zero in the
            first, and are complete after the last.
    """

    seed: popxl.Tensor | None = None
    update: UpdateInputs | None = None
    first_micro_batch: popxl.Tensor | None = None
    is_first: bool = True
    is_last: bool = True

    @property
    def tensors(self) -> list[popxl.Tensor]:
        """All tensors, as a graph takes them."""
        given = [t for t in (self.seed, self.first_micro_batch) if t is not None]
        return given if self.update is None else [*given, *self.update.tensors]

    def with_tensors(self, tensors: Sequence[popxl.Tensor]) -> StepInputs:
        """These inputs in another graph, from their `tensors` there."""
        given = list(tensors)
        seed = None if self.seed is None else given.pop(0)
        first = None if self.first_micro_batch is None else given.pop(0)
        update = None if self.update is None else UpdateInputs(*given)
        return replace(self, seed=seed, first_micro_batch=first, update=update)
