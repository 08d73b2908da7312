"""The output layer of a model: final norm, dropout, a head and the loss of an objective."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

from modelling.layers.dropout import NO_DROPOUT, Dropout
from modelling.layers.module import Module
from modelling.objectives import LOSS_WEIGHT, make_objective
from popxl import Tensor

if TYPE_CHECKING:
    from modelling.layers.experts import ExpertUsage

LOSS_STATS, EXPERT_USAGE = "loss_stats", "expert_usage"
"""Outputs besides the loss: the statistics that it is a function of, and the usage of experts."""


class HeadLoss(Module):
    """Base class of output layers: subclasses compute the objective's statistics from features.

    Attributes:
        objective: what it computes of the features.
        tied: True if the head is the embedding's weight.

    Args:
        norm: the stack's final norm; None: it has none.
        norm_name: Hugging Face's path of the norm.
        dropout: of the norm's output.
        expert_usage: how the usage of experts is counted and balanced; None: it is not counted.
    """

    tied = False

    def __init__(
        self,
        norm: Module | None,
        norm_name: str,
        dropout: Dropout = NO_DROPOUT,
        expert_usage: ExpertUsage | None = None,
    ) -> None:
        super().__init__()
        self.objective, self.expert_usage = make_objective(self.config), expert_usage
        self.norm, self.dropout = norm, dropout
        if norm is not None:
            norm.hf_name = norm_name

    @property
    def aux_outputs(self) -> tuple[str, ...]:
        """Names of the outputs of `build` after the loss."""
        stats = [LOSS_STATS] if self.objective.returns_stats else []
        return (*stats, *([] if self.expert_usage is None else [EXPERT_USAGE]))

    def build(
        self,
        x: Tensor,
        expert_usage: Tensor | None = None,
        seed: Tensor | None = None,
        **inputs: Tensor,
    ) -> tuple[Tensor, ...]:
        """Returns the weighted loss of a micro-batch and the outputs that `aux_outputs` names.

        Args:
            x: the last layer's output, (batch, length, hidden).
            expert_usage: float32 (2, experts), summed over layers, see `ExpertUsage`.
            inputs: `Objective.input_specs` by name.
            seed: uint32 (2,) for dropout, equal on the replicas of a tensor-parallel group.

        Returns:
            The loss, float32 scalar, see `Objective.loss` and `LOSS_WEIGHT`; the objective's
            statistics, if it returns them; the usage of experts, if it is counted.
        """
        objective = self.objective
        token_inputs = {name: inputs[name] for name in objective.token_inputs}
        stats = self.loss_stats(self.features(x, seed), token_inputs)
        sequence_inputs = {name: inputs[name] for name in objective.sequence_inputs}
        loss = objective.loss(stats, sequence_inputs, self.groups) * inputs[LOSS_WEIGHT]
        aux_outputs = [stats] if objective.returns_stats else []
        if self.expert_usage is not None and expert_usage is not None:
            loss = self.expert_usage.add_load_balancing_loss(loss, expert_usage)
            aux_outputs = [*aux_outputs, expert_usage]
        return loss, *aux_outputs

    @abstractmethod
    def loss_stats(self, features: Tensor, token_inputs: Mapping[str, Tensor]) -> Tensor:
        """Computes the objective's statistics, see `Objective.loss_stats`.

        Args:
            features: see `features`.
            token_inputs: `Objective.token_inputs` by name.
        """

    def features(self, x: Tensor, seed: Tensor | None = None) -> Tensor:
        """Applies final norm and dropout: (batch, length, hidden) -> the same shape."""
        return self.dropout(x if self.norm is None else self.norm(x), seed)
