"""What an objective is: what a model learns, as a record."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar

import numpy as np

import popxl
from data.samples import Batch
from popxl import Tensor, TensorSpec

if TYPE_CHECKING:
    from modelling.layers.axes import Axes
    from modelling.layers.parallel import Groups

WEIGHT = "weight"
"""The input that the loss of a micro-batch is multiplied with.

The loss of a global batch is its sum divided by its normaliser. So that the mean of the weighted
sums of all micro-batches (of all data-parallel replicas) is that loss, the weight is the number of
micro-batches divided by the normaliser.
"""


class Objective(ABC):
    """What a model learns.

    Attributes:
        inputs: what the loss reads besides logits: by the name of its stream, the spec of a
            micro-batch on a replica, from that of the tokens whose following ones are predicted.
        metrics: what an evaluation tells, from the loss by name.
    """

    inputs: ClassVar[Mapping[str, Callable[[TensorSpec], TensorSpec]]]
    metrics: ClassVar[Mapping[str, Callable[[float], float]]]

    def streams(self, tokens: TensorSpec) -> dict[str, TensorSpec]:
        """Specs of `inputs` and of `WEIGHT`, as the head takes them."""
        own = {name: spec(tokens) for name, spec in self.inputs.items()}
        return own | {WEIGHT: TensorSpec((), popxl.float32)}

    @abstractmethod
    def loss(
        self, logits: Tensor, inputs: Mapping[str, Tensor], axes: Axes, groups: Groups
    ) -> Tensor:
        """The sum over a micro-batch.

        Args:
            logits: this replica's part of them, in the order of activations, see `LMHead.build`.
            inputs: by name.

        Returns:
            float32 scalar, the same on the replicas of a tensor-parallel group.
        """

    @abstractmethod
    def normaliser(self, batch: Batch) -> int:
        """What a batch adds to the number that the loss of a global batch is divided by."""

    @abstractmethod
    def only(self, batch: Batch, counted: np.ndarray) -> Batch:
        """The batch with nothing to learn in samples that only fill it up.

        Args:
            counted: bool, whether a sample does not.
        """
