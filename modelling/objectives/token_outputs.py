"""Outputs of a frozen model for each token, in place of a loss."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

import popxl
from modelling.objectives.cross_entropy import CrossEntropy, token_losses
from popxl import Tensor
from popxl_addons.utils import cast_if_needed

if TYPE_CHECKING:
    from modelling.layers.activation_layout import ActivationLayout
    from modelling.layers.parallel import ParallelGroups


class TokenOutputs(CrossEntropy):
    """Values of each token as loss statistics: float32 (batch, length, values); no loss.

    Inputs are those of `CrossEntropy`.
    """

    returns_stats = True
    sums_token_losses = False
    has_token_stats = True

    def __init__(self) -> None:
        """Needs no configuration: nothing is smoothed."""

    def loss_stats(
        self,
        logits: Tensor,
        inputs: Mapping[str, Tensor],
        layout: ActivationLayout,
        groups: ParallelGroups,
    ) -> Tensor:
        labels = inputs["labels"]
        batch, length = labels.shape
        shape = (length, batch) if layout.transposed else (batch, length)
        values = self.token_values(logits, labels, layout, groups)
        return layout.transpose_if_sequence_first(values.reshape((*shape, -1)))

    @abstractmethod
    def token_values(
        self, logits: Tensor, labels: Tensor, layout: ActivationLayout, groups: ParallelGroups
    ) -> Tensor:
        """Computes the values of each token: float32 (batch * length, values).

        Args:
            logits: float32 (batch, length, local vocab size).
            labels: int32 (batch, length), batch-first.
            layout: of the logits and of the result.
        """

    def loss(self, stats: Tensor, inputs: Mapping[str, Tensor], groups: ParallelGroups) -> Tensor:
        return popxl.constant(0.0, popxl.float32)


class HiddenStates(TokenOutputs):
    """The last hidden state of each token, of which the LM head makes logits."""

    reads_logits = False

    def token_values(
        self, logits: Tensor, labels: Tensor, layout: ActivationLayout, groups: ParallelGroups
    ) -> Tensor:
        states = logits.reshape((labels.nelms, logits.shape[-1]))
        return cast_if_needed(states, popxl.float32)


class TokenLogps(TokenOutputs):
    """Log-probability of each label, 0 where it is `IGNORE_INDEX`: one value.

    Args:
        temperature: divides the logits.
    """

    def __init__(self, temperature: float = 1.0) -> None:
        super().__init__()
        self._temperature = temperature

    def token_values(
        self, logits: Tensor, labels: Tensor, layout: ActivationLayout, groups: ParallelGroups
    ) -> Tensor:
        if self._temperature != 1:
            logits = logits * (1 / self._temperature)
        return -token_losses(logits, labels, layout, groups, "none")
