"""Contexts of T5's blocks: encoder and decoder over whole samples, and in generation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from config.t5 import T5Config
from data.preferences import answers_of
from modelling.generation.caches import put
from modelling.layers import Context, run_config
from modelling.t5.biases import Packing, RelativePosition
from popxl import Tensor

if TYPE_CHECKING:
    from modelling.t5.model import T5CrossAttention

Padding = tuple[Sequence[Tensor], Tensor | None]
"""What hides padding: biases of the scores, or a number of keys for each sample."""


class T5Context(Context):
    """The context of a stack's block.

    Args:
        seed: see `Context`.
        bias: of relative positions, where it is at hand.
    """

    def __init__(self, seed: Tensor | None = None, bias: Tensor | None = None) -> None:
        super().__init__(seed=seed)
        self._bias = bias

    def position_bias(self, relative: RelativePosition, length: int) -> Tensor:
        """Biases of relative positions, which broadcast to (batch, heads, queries, keys)."""
        return relative(length, length) if self._bias is None else self._bias

    def padding(self, takes_lengths: bool) -> Padding:
        """What hides the padding of x.

        Args:
            takes_lengths: whether attention takes numbers of keys: a kernel adds one bias, not two.
        """
        return [], None


class EncoderContext(T5Context):
    """The context of the encoder's blocks.

    Args:
        mask: int32 (batch, length), see `Packing`.
    """

    def __init__(
        self, mask: Tensor, seed: Tensor | None = None, bias: Tensor | None = None
    ) -> None:
        super().__init__(seed, bias)
        self._mask, self._packing = mask, packing()

    def padding(self, takes_lengths: bool) -> Padding:
        if takes_lengths and self._packing.examples == 1 and self._bias is None:
            return [], self._packing.lengths(self._mask)
        return [self._packing.encoder_bias(self._mask)], None


class DecoderContext(T5Context):
    """The context of the decoder's blocks.

    Args:
        encoded: the encoder's output, (batch, encoder length, hidden).
        mask: int32 (batch, encoder length), see `Packing`.

    Attributes:
        packing: of the sequences.
    """

    def __init__(self, encoded: Tensor, mask: Tensor, seed: Tensor | None = None) -> None:
        super().__init__(seed)
        self._encoded, self._mask, self.packing = encoded, mask, packing()

    def encoder_padding(self, takes_lengths: bool, length: int) -> Padding:
        """What hides the encoder's padding, and other examples of the sample; see `padding`.

        Args:
            length: queries of a sequence.
        """
        if takes_lengths and self.packing.examples == 1:
            return [], self.packing.lengths(self._mask)
        return [self.packing.cross_bias(self._mask, length)], None

    def encoder_keys(self, attention: T5CrossAttention) -> tuple[Tensor, Tensor]:
        """Keys and values of the encoder's output, (batch, heads, encoder length, d_kv) each."""
        return attention.project_kv(self._encoded)


class DecoderTokenContext(DecoderContext):
    """The context of one token of each sequence.

    Args:
        caches: keys and values of the encoder's output, and those of the tokens before,
            (sequences, heads, positions, d_kv) each.
        position: of the token, int32 scalar.
        position_bias: float32 (1, heads, 1, positions); it also hides later positions.
        hiding: see `Packing.cross_bias`.

    Attributes:
        caches: of the tokens, with the new one once the block is built.
    """

    def __init__(
        self,
        packing: Packing,
        caches: Sequence[Tensor],
        position: Tensor,
        position_bias: Tensor,
        hiding: Tensor,
    ) -> None:
        T5Context.__init__(self, bias=position_bias)
        self.packing, self._position, self._hiding = packing, position, hiding
        keys, values, *own = caches
        self._encoder_keys, self.caches = (keys, values), own

    def encoder_padding(self, takes_lengths: bool, length: int) -> Padding:
        return [self._hiding], None

    def encoder_keys(self, attention: T5CrossAttention) -> tuple[Tensor, Tensor]:
        return self._encoder_keys

    def update_cache(self, k: Tensor, v: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
        self.caches = put(self.caches, self._position, [k, v])
        return self.caches[0], self.caches[1]


def packing() -> Packing:
    """The packing of the samples of the run that modules are made for."""
    config = run_config()
    assert isinstance(config, T5Config)
    return Packing.of(config, answers_of(config))
