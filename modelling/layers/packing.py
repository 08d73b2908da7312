"""Samples of an encoder-decoder that hold several examples, none of which sees another.

The examples of a sample lie side by side in the encoder, where the mask has their numbers. In the
decoder each is a sequence of its own, so that only cross-attention brings them together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

import popxl
from config.sections import RunConfig
from config.task import Seq2SeqData
from modelling.layers.axes import ActivationLayout
from modelling.layers.masking import padding_bias, segment_bias
from modelling.layers.module import cast
from popxl import Tensor, ops

_BATCH_FIRST = ActivationLayout()


@dataclass(frozen=True)
class Packing:
    """Masks and shapes of samples with up to `examples` examples.

    A mask is int32 (batch, encoder length): the number of the example that a token belongs to, from
    1, and 0 for padding.
    """

    examples_per_sample: int
    sequences_per_example: int = 1
    """Decoder sequences of an example: several where generation searches with beams, or preferences
    are learned."""
    layout: ActivationLayout = _BATCH_FIRST
    """The order of axes in activations that `pack_sequences` and `unpack_sequences` take."""

    @classmethod
    def from_config(cls, config: RunConfig, sequences: int = 1) -> Self:
        """The packing of a configuration's samples."""
        assert isinstance(config.data, Seq2SeqData)
        return cls(config.data.examples_per_row, sequences, ActivationLayout.from_config(config))

    @property
    def sequences_per_sample(self) -> int:
        """Decoder sequences of a sample."""
        return self.examples_per_sample * self.sequences_per_example

    def encoder_bias(self, mask: Tensor) -> Tensor:
        """Lets tokens see those of their example: float32, broadcasts to (batch, 1, q, k)."""
        return padding_bias(mask) if self.examples_per_sample == 1 else segment_bias(mask, mask)

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
        if self.examples_per_sample == 1:
            return padding_bias(mask)
        numbers = np.repeat(self._numbers, self.sequences_per_example * length)
        return segment_bias(popxl.constant(numbers[None], popxl.int32, "examples"), mask)

    def has_tokens(self, mask: Tensor) -> Tensor:
        """True for each example that has a token: bool (batch * examples,)."""
        if self.examples_per_sample == 1:
            return ops.cast(ops.max(mask, 1), popxl.bool)
        batch, length = mask.shape
        own = ops.equal(mask.reshape((batch, 1, length)), self._constant((1, -1, 1)))
        there = ops.max(cast(own, popxl.int32), 2)
        return ops.cast(ops.reshape(there, (batch * self.examples_per_sample,)), popxl.bool)

    def positions(self, mask: Tensor) -> Tensor:
        """The position of each token in its example: int32 (batch, encoder length)."""
        batch, length = mask.shape
        index = popxl.constant(np.arange(length)[None], popxl.int32, "positions")
        if self.examples_per_sample == 1:
            return index
        mask, numbers = mask.reshape((batch, length, 1)), self._constant((1, 1, -1))
        lengths = ops.sum(cast(ops.equal(mask, numbers), popxl.int32), 1, keepdims=True)
        before = cast(ops.greater(mask, numbers), popxl.int32) * lengths
        return index - ops.sum(before, 2)

    def pack_sequences(self, x: Tensor) -> Tensor:
        """(batch * n, length, hidden) -> (batch, n * length, hidden), n = examples * sequences."""
        x = self.layout.convert(x)
        sequences, length, hidden = x.shape
        return self.layout.convert(
            x.reshape(
                (sequences // self.sequences_per_sample, self.sequences_per_sample * length, hidden)
            )
        )

    def unpack_sequences(self, x: Tensor) -> Tensor:
        """The inverse of `pack_sequences`."""
        x = self.layout.convert(x)
        batch, length, hidden = x.shape
        return self.layout.convert(
            x.reshape(
                (batch * self.sequences_per_sample, length // self.sequences_per_sample, hidden)
            )
        )

    @property
    def _numbers(self) -> np.ndarray:
        return np.arange(1, self.examples_per_sample + 1, dtype=np.int32)

    def _constant(self, shape: tuple[int, ...]) -> Tensor:
        return popxl.constant(self._numbers.reshape(shape), popxl.int32, "examples")
