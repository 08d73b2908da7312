"""KV caches: layout in memory, update with new tokens, reordering for beam search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

import popxl
from popxl import Tensor, ops

POSITIONS = 2
"""Axis of the positions in K and V, (batch, heads, positions, head_dim)."""

EMPTY_POSITION = 2**30
"""Position of an empty cache entry: every query comes before it, so attention masks it."""


def update_cache(
    caches: Sequence[Tensor], cache_index: Tensor, new_kv: Sequence[Tensor]
) -> list[Tensor]:
    """Write K and V of one new position to a layer's caches.

    Args:
        caches: K and V, (batch, heads, positions, head_dim) each.
        cache_index: index along the positions, int32 scalar.
        new_kv: K and V of the position, (batch, heads, 1, head_dim) each.

    Returns:
        The updated K and V.
    """
    return [
        ops.dynamic_update(cache, cache_index, t, [POSITIONS], [1], no_overlap=True)
        for cache, t in zip(caches, new_kv, strict=True)
    ]


def reorder_cache(caches: Sequence[Tensor], beam_idx: Sequence[Tensor]) -> list[Tensor]:
    """Gather the caches of the sequence that each beam continues: (sequences, ...), same shape.

    Args:
        beam_idx: `SearchStepResult.beam_idx` as the only element; empty: each sequence keeps its
            own.
    """
    return [ops.gather(cache, idx) for cache in caches for idx in beam_idx] or list(caches)


@dataclass(frozen=True)
class KVCacheLayout:
    """KV cache layout of decoder-only layers with full attention: prompt first, then new tokens.

    The cache has an entry for each token of the longest prompt, followed by an entry for each new
    token: the cache index of a new token is the same for all samples, and its position is not. The
    loop reads the last token of a prompt again, as its first token.

    The argument `position` is the decoding step, int32 scalar; `last_positions`, int32 (batch,),
    has the position of each prompt's last token.

    Attributes:
        prompt_length: tokens of the longest prompt.
        max_new_tokens: tokens that are generated.
    """

    prompt_length: int
    max_new_tokens: int

    @property
    def max_length(self) -> int:
        """Largest number of tokens of a prompt and its answer together."""
        return self.prompt_length + self.max_new_tokens

    def with_window(self, window: int | None) -> KVCacheLayout:
        """Return the cache layout of a layer with an attention window (None: full attention)."""
        if window is None or window >= self.max_length:
            return self
        return SlidingWindowCacheLayout(self.prompt_length, self.max_new_tokens, window)

    def init_cache(self, kv: Tensor, last_positions: Tensor) -> Tensor:
        """Allocate a cache that starts with the prompts' K or V, of the same dtype.

        Shapes: (batch, heads, prompt_length, head_dim) -> (batch, heads, cache length, head_dim).
        """
        batch, heads, _, size = kv.shape
        return ops.concat(
            [kv, ops.init((batch, heads, self.max_new_tokens, size), kv.dtype)], POSITIONS
        )

    def cache_index(self, position: Tensor) -> Tensor:
        """Cache index at which a new token's K and V are written, an int32 scalar."""
        return position + self.prompt_length

    def key_positions(self, position: Tensor, last_positions: Tensor) -> Tensor:
        """Position of each cache entry, int32 (batch, cache length).

        A prompt's last token and its padding have `EMPTY_POSITION`: the loop reads that token.
        """
        last_positions = last_positions.reshape((-1, 1))
        index = np.arange(self.max_length)[None]
        old = popxl.constant(np.minimum(index, self.prompt_length), popxl.int32, "prompt_entries")
        new = popxl.constant(np.maximum(index - self.prompt_length, 0), popxl.int32, "new_entries")
        is_new = popxl.constant(index >= self.prompt_length, popxl.bool, "is_new")
        prompt_positions = ops.where(
            ops.greater(last_positions, old), old, _empty_position_tensor()
        )
        return ops.where(is_new, last_positions + new, prompt_positions)


@dataclass(frozen=True)
class SlidingWindowCacheLayout(KVCacheLayout):
    """KV cache layout of sliding-window layers: a ring buffer of `window` entries.

    Prefill stores the positions before each prompt's last token in order. A new token replaces the
    one that leaves the window, which has the same cache index in all samples.
    """

    window: int = 1

    def init_cache(self, kv: Tensor, last_positions: Tensor) -> Tensor:
        batch = kv.shape[0]
        offsets = popxl.constant(np.arange(self.window)[None] - self.window, popxl.int32, "offsets")
        index = ops.maximum(
            last_positions.reshape((-1, 1)) + offsets, popxl.constant(0, popxl.int32)
        )
        if batch == 1:
            return ops.gather(kv, index.reshape((self.window,)), POSITIONS)
        return ops.groupedgather(kv, index, POSITIONS - 1, batch)

    def cache_index(self, position: Tensor) -> Tensor:
        indices = np.arange(self.max_new_tokens) % self.window
        return ops.gather(popxl.constant(indices, popxl.int32, "ring_indices"), position)

    def key_positions(self, position: Tensor, last_positions: Tensor) -> Tensor:
        """Position of each cache entry, int32 (batch, window); `EMPTY_POSITION` if unused."""
        entries = popxl.constant(np.arange(self.window)[None], popxl.int32, "entries")
        zero, age = popxl.constant(0, popxl.int32), self.cache_index(position) - entries
        age = ops.where(ops.greater(zero, age), age + self.window, age)
        positions = last_positions.reshape((-1, 1)) + position - age
        return ops.where(ops.greater(zero, positions), _empty_position_tensor(), positions)


def _empty_position_tensor() -> Tensor:
    return popxl.constant(EMPTY_POSITION, popxl.int32, "empty_position")
