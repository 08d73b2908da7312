"""Attention contexts of decoder blocks with KV caches: one for prefill, one for decoding.

Prompts are padded on the right and have different lengths. `KVCacheLayout` defines the cache index
of each key and value. Attention masks by positions: empty and padded cache entries have a position
beyond that of any query.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from modelling.generation.kv_cache import KVCacheLayout, update_cache
from modelling.generation.prompts import repeat_interleave
from modelling.layers import BlockContext, Module, RopeTables, gather_rope_tables
from modelling.layers.layer_wrapper import LayerWrapper
from popxl import Tensor


class PrefillAttentionContext(BlockContext):
    """Attention of a block that processes prompts and fills the KV caches of their sequences.

    Args:
        layout: of layers with full attention.
        last_positions: see `KVCacheLayout`.
        sequences: number of sequences decoded for each prompt.

    Attributes:
        caches: K and V of each sequence, set when the block is built.
    """

    def __init__(self, layout: KVCacheLayout, last_positions: Tensor, sequences: int) -> None:
        super().__init__()
        self._cache_layout, self._last, self._sequences = layout, last_positions, sequences
        self.max_length = layout.max_length
        self.caches: list[Tensor] = []

    def update_cache(self, k: Tensor, v: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
        layout = self._cache_layout.with_window(window)
        self.caches = [
            repeat_interleave(layout.init_cache(t, self._last), self._sequences) for t in (k, v)
        ]
        return k, v


class DecodeAttentionContext(BlockContext):
    """Attention of a block that processes one token per sequence and updates the KV caches.

    Args:
        caches: K and V of the earlier tokens, (sequences, heads, cache length, head_dim) each.
        layout: of layers with full attention.
        last_positions: see `KVCacheLayout`.
        position: decoding step, int32 scalar.

    Attributes:
        caches: K and V including the new token, set when the block is built.
    """

    def __init__(
        self,
        caches: Sequence[Tensor],
        layout: KVCacheLayout,
        last_positions: Tensor,
        position: Tensor,
    ) -> None:
        super().__init__()
        self._cache_layout, self._last, self._position = layout, last_positions, position
        self.max_length = layout.max_length
        self.caches = list(caches)

    def rope_tables(self, make_tables: Callable[[int], RopeTables], length: int) -> RopeTables:
        return gather_rope_tables(make_tables(self.max_length), self._last + self._position)

    def qk_ids(self, window: int | None) -> Sequence[Tensor]:
        query_positions = self._last + self._position
        layout = self._cache_layout.with_window(window)
        return [query_positions.reshape((-1, 1)), layout.key_positions(self._position, self._last)]

    def update_cache(self, k: Tensor, v: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
        layout = self._cache_layout.with_window(window)
        self.caches = update_cache(self.caches, layout.cache_index(self._position), [k, v])
        return self.caches[0], self.caches[1]


class PrefillBlock(LayerWrapper):
    """A decoder block that processes whole prompts and returns their KV caches.

    Args:
        layout, sequences: see `PrefillAttentionContext`.
    """

    def __init__(self, layer: Module, layout: KVCacheLayout, sequences: int) -> None:
        super().__init__(layer)
        self._layout, self._sequences = layout, sequences

    def build(self, x: Tensor, last_positions: Tensor) -> tuple[Tensor, ...]:
        """Run the block on prompts, x (batch, length, hidden) -> same shape; K and V per sequence.

        Args:
            last_positions: see `KVCacheLayout`.
        """
        ctx = PrefillAttentionContext(self._layout, last_positions, self._sequences)
        return self.layer(x, ctx), *ctx.caches


class CachedDecoderBlock(LayerWrapper):
    """A decoder block that processes one new token of each sequence and updates the KV caches.

    Args:
        layout: see `DecodeAttentionContext`.
    """

    def __init__(self, layer: Module, layout: KVCacheLayout) -> None:
        super().__init__(layer)
        self._layout = layout

    def build(
        self, x: Tensor, caches: Sequence[Tensor], last_positions: Tensor, position: Tensor
    ) -> tuple[Tensor, ...]:
        """Run the block on one token, x (sequences, 1, hidden) -> same shape; K and V so far.

        Args:
            caches, last_positions, position: see `DecodeAttentionContext`.
        """
        ctx = DecodeAttentionContext(caches, self._layout, last_positions, position)
        return self.layer(x, ctx), *ctx.caches
