"""Inputs that all phases of an optimizer step get, as arguments of the loops over layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import popxl


@dataclass(frozen=True)
class UpdateInputs:
    """Inputs of an optimizer update besides gradients and state: global norm and learning rate.

    Both are float32 scalars.

    Attributes:
        norm: global norm of the unscaled gradients; if it is not finite, nothing is updated.
        lr: learning rate.
    """

    norm: popxl.Tensor
    lr: popxl.Tensor

    @property
    def tensors(self) -> list[popxl.Tensor]:
        """Global gradient norm and learning rate, in the order of graph arguments."""
        return [self.norm, self.lr]


@dataclass(frozen=True)
class StepInputs:
    """Inputs of a pass over all layers besides the batch: seed, first micro-batch, pending update.

    Attributes:
        seed: seed of the step, for dropout, uint32 (2,); None: nothing is random.
        update: deferred update of the previous step, which each layer runs before the step first
            uses its variables; None: no update is pending.
        first_micro_batch: index in the step of the pass's first micro-batch, int32 scalar; None:
            the step has one pass.
        is_first: True for the first pass of the step, whose gradient sums start from zero.
        is_last: True for the last pass of the step, which completes the gradients.
    """

    seed: popxl.Tensor | None = None
    update: UpdateInputs | None = None
    first_micro_batch: popxl.Tensor | None = None
    is_first: bool = True
    is_last: bool = True

    @property
    def tensors(self) -> list[popxl.Tensor]:
        """This pass's input tensors, in the order of graph arguments."""
        tensors = [t for t in (self.seed, self.first_micro_batch) if t is not None]
        return tensors if self.update is None else [*tensors, *self.update.tensors]

    def with_tensors(self, tensors: Sequence[popxl.Tensor]) -> StepInputs:
        """Returns these inputs inside another graph, whose inputs are `tensors`."""
        remaining = list(tensors)
        seed = None if self.seed is None else remaining.pop(0)
        first = None if self.first_micro_batch is None else remaining.pop(0)
        update = None if self.update is None else UpdateInputs(*remaining)
        return replace(self, seed=seed, first_micro_batch=first, update=update)
