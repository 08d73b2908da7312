"""Attention contexts of a decoder's blocks with KV caches: one for prompts, one for a new token.

Prompts are padded on the right and have different lengths. `KVCacheLayout` defines the cache index
of each key and value. Attention masks by positions: empty and padded cache entries have a position
beyond that of any query.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from modelling.generation.kv_cache import KVCacheLayout, update_cache
from modelling.generation.prompts import repeat_interleave
from modelling.layers import BlockContext, Module, RopeTables, gather_rope_tables
from modelling.layers.wrapped import LayerWrapper
from popxl import Tensor


class PromptContext(BlockContext):
    """The context of prompts, each for several sequences.

    Args:
        prompt, room: see `KVCacheLayout`.
        last: see `KVCacheLayout`.
        sequences: of a prompt.

    Attributes:
        caches: keys and values of each sequence, once the block is built.
    """

    def __init__(
        self, prompt_length: int, max_new_tokens: int, last: Tensor, sequences: int
    ) -> None:
        super().__init__()
        self._prompt_length, self._max_new_tokens, self._last, self._sequences = (
            prompt_length,
            max_new_tokens,
            last,
            sequences,
        )
        self.max_length = prompt_length + max_new_tokens
        self.caches: list[Tensor] = []

    def update_cache(self, k: Tensor, v: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
        layout = KVCacheLayout.for_layer(self._prompt_length, self._max_new_tokens, window)
        self.caches = [
            repeat_interleave(layout.init_cache(t, self._last), self._sequences) for t in (k, v)
        ]
        return k, v


class TokenContext(BlockContext):
    """The context of one token of each sequence.

    Args:
        caches: keys and values of the tokens before, (sequences, heads, slots, head_dim) each.
        prompt, room, last: see `KVCacheLayout`.
        position: in the loop, int32 scalar.

    Attributes:
        caches: with the token's, once the block is built.
    """

    def __init__(
        self,
        caches: Sequence[Tensor],
        prompt_length: int,
        max_new_tokens: int,
        last: Tensor,
        position: Tensor,
    ) -> None:
        super().__init__()
        self._prompt_length, self._max_new_tokens, self._last, self._position = (
            prompt_length,
            max_new_tokens,
            last,
            position,
        )
        self.max_length = prompt_length + max_new_tokens
        self.caches = list(caches)

    def rope_tables(self, make: Callable[[int], RopeTables], length: int) -> RopeTables:
        return gather_rope_tables(
            make(self._prompt_length + self._max_new_tokens), self._last + self._position
        )

    def qk_ids(self, window: int | None) -> Sequence[Tensor]:
        place = self._last + self._position
        layout = KVCacheLayout.for_layer(self._prompt_length, self._max_new_tokens, window)
        return [place.reshape((-1, 1)), layout.key_positions(self._position, self._last)]

    def update_cache(self, k: Tensor, v: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
        slot = KVCacheLayout.for_layer(
            self._prompt_length, self._max_new_tokens, window
        ).cache_index(self._position)
        self.caches = update_cache(self.caches, slot, [k, v])
        return self.caches[0], self.caches[1]


class Prefill(LayerWrapper):
    """A block that reads prompts.

    Args:
        prompt, room, sequences: see `PromptContext`.
    """

    def __init__(
        self, layer: Module, prompt_length: int, max_new_tokens: int, sequences: int
    ) -> None:
        super().__init__(layer)
        self._prompt_length, self._max_new_tokens, self._sequences = (
            prompt_length,
            max_new_tokens,
            sequences,
        )

    def build(self, x: Tensor, last: Tensor) -> tuple[Tensor, ...]:
        """x: (batch, length, hidden) -> the same shape, and each sequence's keys and values.

        Args:
            last: see `KVCacheLayout`.
        """
        ctx = PromptContext(self._prompt_length, self._max_new_tokens, last, self._sequences)
        return self.layer(x, ctx), *ctx.caches


class Decode(LayerWrapper):
    """A block that reads one token of each sequence.

    Args:
        prompt, room: see `TokenContext`.
    """

    def __init__(self, layer: Module, prompt_length: int, max_new_tokens: int) -> None:
        super().__init__(layer)
        self._prompt_length, self._max_new_tokens = prompt_length, max_new_tokens

    def build(
        self, x: Tensor, caches: Sequence[Tensor], last: Tensor, position: Tensor
    ) -> tuple[Tensor, ...]:
        """x: (sequences, 1, hidden) -> the same shape, and `caches` with this token's.

        Args:
            caches, last, position: see `TokenContext`.
        """
        ctx = TokenContext(caches, self._prompt_length, self._max_new_tokens, last, position)
        return self.layer(x, ctx), *ctx.caches
