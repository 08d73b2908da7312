"""What an objective is: what a model learns, as a record."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar

import numpy as np

import popxl
from config.metrics import Metrics, Tally
from data.samples import Batch
from popxl import Tensor, TensorSpec

if TYPE_CHECKING:
    from modelling.layers.axes import ActivationLayout
    from modelling.layers.parallel import ParallelGroups

LOSS_WEIGHT = "weight"
"""The input that the loss of a micro-batch is multiplied with.

The loss of a global batch is its sum divided by its normaliser. So that the mean of the weighted
sums of all micro-batches (of all data-parallel replicas) is that loss, the weight is the number of
micro-batches divided by the normaliser.
"""

SpecOf = Callable[[TensorSpec], TensorSpec]
"""The spec of a micro-batch on a replica, from that of the tokens whose following ones are
predicted."""


class Objective(ABC):
    """What a model learns.

    It is in two steps, since the logits of all tokens may take more than a device has: sums over
    tokens, for one slice of them after the other, and the loss as a function of the sums.

    Attributes:
        of_tokens: what the sums need besides logits, by the name of its stream: (batch, length).
        of_texts: what the loss needs besides the sums.
        metrics: what an evaluation tells, from a tally of it.
        tells: whether the sums go to the host, for `tally`.
    """

    token_inputs: Mapping[str, SpecOf]
    sequence_inputs: Mapping[str, SpecOf]
    metrics: Metrics
    returns_stats: ClassVar[bool] = False

    def input_specs(self, tokens: TensorSpec) -> dict[str, TensorSpec]:
        """Specs of all that is read besides logits and of `LOSS_WEIGHT`, as the head takes them."""
        read = {**self.token_inputs, **self.sequence_inputs}
        own = {name: spec(tokens) for name, spec in read.items()}
        return own | {LOSS_WEIGHT: TensorSpec((), popxl.float32)}

    @abstractmethod
    def loss_stats(
        self,
        logits: Tensor,
        inputs: Mapping[str, Tensor],
        layout: ActivationLayout,
        groups: ParallelGroups,
    ) -> Tensor:
        """What is summed over tokens.

        Args:
            logits: this replica's part of them, in the order of activations, see `LMHead.build`.
            inputs: `token_inputs` by name.

        Returns:
            float32, the same on the replicas of a tensor-parallel group; the shape may depend on
            the number of texts, but not on their length.
        """

    @abstractmethod
    def loss(self, sums: Tensor, inputs: Mapping[str, Tensor], groups: ParallelGroups) -> Tensor:
        """The sum over a micro-batch: float32 scalar.

        Args:
            sums: over all of its tokens.
            inputs: `sequence_inputs` by name.
        """

    @abstractmethod
    def normalizer(self, batch: Batch) -> int:
        """What a batch adds to the number that the loss of a global batch is divided by."""

    @abstractmethod
    def keep_real_samples(self, batch: Batch, counted: np.ndarray) -> Batch:
        """The batch with nothing to learn in samples that only fill it up.

        Args:
            counted: bool, whether a sample does not.
        """

    def tally(self, sums: np.ndarray, batch: Batch) -> Tally:
        """What there is to tell of a batch besides its loss.

        Args:
            sums: of the texts of the batch, in their order.
        """
        return {}
