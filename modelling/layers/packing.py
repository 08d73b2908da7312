"""Packed samples of encoder-decoders: several examples that do not attend to each other.

In the encoder, the examples of a sample are concatenated; the mask has their numbers. In the
decoder each is a sequence of its own, so that only cross-attention joins them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

import popxl
from config.sections import RunConfig
from config.task import Seq2SeqData
from modelling.layers.activation_layout import ActivationLayout
from modelling.layers.masking import padding_bias, segment_bias
from modelling.layers.module import cast_if_needed
from popxl import Tensor, ops

_BATCH_FIRST = ActivationLayout()


@dataclass(frozen=True)
class Packing:
    """Packing of encoder-decoder samples: masks, positions and shapes for several examples in each.

    A mask is int32 (batch, encoder length): the number, from 1, of the example that a token belongs
    to, and 0 for padding.

    Attributes:
        examples_per_sample: at most.
        sequences_per_example: decoder sequences of an example: several with beam search or
            preference pairs.
        layout: of the activations that `pack_sequences` and `unpack_sequences` take.
    """

    examples_per_sample: int
    sequences_per_example: int = 1
    layout: ActivationLayout = _BATCH_FIRST

    @classmethod
    def from_config(cls, config: RunConfig, sequences_per_example: int = 1) -> Self:
        """Returns how a configuration packs examples into samples."""
        assert isinstance(config.data, Seq2SeqData)
        layout = ActivationLayout.from_config(config)
        return cls(config.max_texts_per_sample, sequences_per_example, layout)

    @property
    def sequences_per_sample(self) -> int:
        """Number of decoder sequences in a sample."""
        return self.examples_per_sample * self.sequences_per_example

    def encoder_attention_bias(self, mask: Tensor) -> Tensor:
        """Returns the encoder self-attention bias that masks padding and other examples.

        float32, broadcasts to (batch, 1, q, k).
        """
        return padding_bias(mask) if self.examples_per_sample == 1 else segment_bias(mask, mask)

    def sequence_lengths(self, mask: Tensor) -> Tensor:
        """Returns the token counts of unpacked samples, padded on the right: int32 (batch,).

        It is at least 1, so that the softmax of a sample that is all padding is finite.
        """
        return ops.maximum(ops.sum(mask, 1), popxl.constant(1, popxl.int32))

    def cross_attention_bias(self, mask: Tensor, length: int) -> Tensor:
        """Returns the cross-attention bias that masks encoder tokens of other examples.

        Args:
            length: queries of a decoder sequence.

        Returns:
            float32, broadcasts to (batch, 1, sequences_per_sample * length, encoder length).
        """
        if self.examples_per_sample == 1:
            return padding_bias(mask)
        query_segments = np.repeat(self._example_ids, self.sequences_per_example * length)
        return segment_bias(popxl.constant(query_segments[None], popxl.int32, "examples"), mask)

    def real_example_mask(self, mask: Tensor) -> Tensor:
        """True for each example that has a token: bool (batch * examples_per_sample,)."""
        if self.examples_per_sample == 1:
            return ops.cast(ops.max(mask, 1), popxl.bool)
        batch, length = mask.shape
        belongs = ops.equal(
            mask.reshape((batch, 1, length)), self._constant_example_ids((1, -1, 1))
        )
        has_any = ops.max(cast_if_needed(belongs, popxl.int32), 2)
        return ops.cast(ops.reshape(has_any, (batch * self.examples_per_sample,)), popxl.bool)

    def position_ids(self, mask: Tensor) -> Tensor:
        """Returns the position of each token within its example: int32 (batch, encoder length)."""
        batch, length = mask.shape
        index = popxl.constant(np.arange(length)[None], popxl.int32, "positions")
        if self.examples_per_sample == 1:
            return index
        mask, example_ids = mask.reshape((batch, length, 1)), self._constant_example_ids((1, 1, -1))
        lengths = ops.sum(
            cast_if_needed(ops.equal(mask, example_ids), popxl.int32), 1, keepdims=True
        )
        earlier = cast_if_needed(ops.greater(mask, example_ids), popxl.int32) * lengths
        return index - ops.sum(earlier, 2)

    def pack_sequences(self, x: Tensor) -> Tensor:
        """Joins a sample's n decoder sequences along the length; inverse of `unpack_sequences`.

        (batch * n, length, hidden) -> (batch, n * length, hidden), n = sequences_per_sample.
        """
        x = self.layout.transpose_if_sequence_first(x)
        sequences, length, hidden = x.shape
        n = self.sequences_per_sample
        return self.layout.transpose_if_sequence_first(
            x.reshape((sequences // n, n * length, hidden))
        )

    def unpack_sequences(self, x: Tensor) -> Tensor:
        """Splits a sample's n decoder sequences; the inverse of `pack_sequences`.

        (batch, n * length, hidden) -> (batch * n, length, hidden), n = sequences_per_sample.
        """
        x = self.layout.transpose_if_sequence_first(x)
        batch, length, hidden = x.shape
        n = self.sequences_per_sample
        return self.layout.transpose_if_sequence_first(x.reshape((batch * n, length // n, hidden)))

    @property
    def _example_ids(self) -> np.ndarray:
        return np.arange(1, self.examples_per_sample + 1, dtype=np.int32)

    def _constant_example_ids(self, shape: tuple[int, ...]) -> Tensor:
        return popxl.constant(self._example_ids.reshape(shape), popxl.int32, "examples")
