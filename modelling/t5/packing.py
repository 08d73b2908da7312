"""Samples of several examples: what keeps them apart.

The examples of a sample lie side by side in the encoder, where the mask has their numbers. In the
decoder each is a sequence of its own, so that only cross-attention brings them together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

import popxl
from config.t5 import T5Config
from modelling.layers import Axes, cast, padding_bias, segment_bias
from popxl import Tensor, ops

_BATCH_FIRST = Axes()


@dataclass(frozen=True)
class Packing:
    """Masks and shapes of samples with up to `examples` examples.

    A mask is int32 (batch, encoder length): the number of the example that a token belongs to, from
    1, and 0 for padding.
    """

    examples: int
    sequences: int = 1
    """Decoder sequences of an example: several where generation searches with beams."""
    axes: Axes = _BATCH_FIRST
    """Of the activations that `together` and `apart` take."""

    @classmethod
    def of(cls, config: T5Config, sequences: int = 1) -> Self:
        """Those of a configuration."""
        return cls(config.data.examples_per_row, sequences, Axes.of(config))

    @property
    def count(self) -> int:
        """Decoder sequences of a sample."""
        return self.examples * self.sequences

    def encoder_bias(self, mask: Tensor) -> Tensor:
        """Lets tokens see those of their example: float32, broadcasts to (batch, 1, q, k)."""
        return padding_bias(mask) if self.examples == 1 else segment_bias(mask, mask)

    def lengths(self, mask: Tensor) -> Tensor:
        """Tokens of each sample of one example, whose padding is at the end: int32 (batch,). At
        least 1, so that a sample of padding alone has a softmax."""
        return ops.maximum(ops.sum(mask, 1), popxl.constant(1, popxl.int32))

    def cross_bias(self, mask: Tensor, length: int) -> Tensor:
        """Lets the queries of each example's decoder sequences see its tokens in the encoder.

        Args:
            length: queries of a decoder sequence.

        Returns:
            float32, broadcasts to (batch, 1, examples * sequences * length, encoder length).
        """
        if self.examples == 1:
            return padding_bias(mask)
        numbers = np.repeat(
            np.arange(1, self.examples + 1, dtype=np.int32), self.sequences * length
        )
        return segment_bias(popxl.constant(numbers[None], popxl.int32, "examples"), mask)

    def is_there(self, mask: Tensor) -> Tensor:
        """Whether each example has any token: bool (batch * examples,)."""
        batch, length = mask.shape
        if self.examples == 1:
            return ops.cast(ops.max(mask, 1), popxl.bool)
        numbers = np.arange(1, self.examples + 1, dtype=np.int32).reshape(1, -1, 1)
        own = ops.equal(
            ops.reshape(mask, (batch, 1, length)), popxl.constant(numbers, popxl.int32, "examples")
        )
        found = ops.max(cast(own, popxl.int32), 2)
        return ops.cast(ops.reshape(found, (batch * self.examples,)), popxl.bool)

    def together(self, x: Tensor) -> Tensor:
        """(batch * n, length, hidden) -> (batch, n * length, hidden), n = examples * sequences."""
        x = self.axes.swap(x)
        sequences, length, hidden = x.shape
        return self.axes.swap(x.reshape((sequences // self.count, self.count * length, hidden)))

    def apart(self, x: Tensor) -> Tensor:
        """The inverse of `together`."""
        x = self.axes.swap(x)
        batch, length, hidden = x.shape
        return self.axes.swap(x.reshape((batch * self.count, length // self.count, hidden)))
