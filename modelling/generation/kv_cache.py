"""Key/value caches: what a layer keeps of the positions it has read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

import popxl
from popxl import Tensor, ops

POSITIONS = 2
"""Axis of the positions in keys and values, (batch, heads, positions, head_size)."""

EMPTY_POSITION = 2**30
"""Position of a slot that holds nothing: every query comes before it."""


def update_cache(caches: Sequence[Tensor], slot: Tensor, new: Sequence[Tensor]) -> list[Tensor]:
    """A layer's keys and values with those of one position in place.

    Args:
        caches: keys and values of all positions.
        slot: of the position, int32 scalar.
        new: key and value of the position, (batch, heads, 1, head_size) each.
    """
    return [
        ops.dynamic_update(cache, slot, t, [POSITIONS], [1], no_overlap=True)
        for cache, t in zip(caches, new, strict=True)
    ]


def reorder_cache(caches: Sequence[Tensor], beam_idx: Sequence[Tensor]) -> list[Tensor]:
    """The caches of the sequences that are continued.

    Args:
        parents: none, or `Advance.beam_idx` alone.
    """
    return [ops.gather(cache, p) for cache in caches for p in beam_idx] or list(caches)


@dataclass(frozen=True)
class KVCacheLayout:
    """Where a decoder alone keeps keys and values: of all positions.

    There is a slot for each token of the longest prompt, and after them one for each token that is
    generated: the slot of a new token is the same for all samples, and its position is not. The
    last token of a prompt is read anew, as the first of the loop.

    Where an argument is `position`, it is that in the loop, int32 scalar; `last`, int32 (batch,),
    has the position of each sequence's last word in its prompt.

    Attributes:
        prompt: tokens of the longest prompt.
        room: tokens that are generated.
    """

    prompt_length: int
    max_new_tokens: int

    @classmethod
    def for_layer(
        cls, prompt_length: int, max_new_tokens: int, window: int | None = None
    ) -> KVCacheLayout:
        """Slots for layers that see `window` positions, their own included; None: all."""
        if window is None or window >= prompt_length + max_new_tokens:
            return KVCacheLayout(prompt_length, max_new_tokens)
        return SlidingWindowCacheLayout(prompt_length, max_new_tokens, window)

    def init_cache(self, kv: Tensor, last: Tensor) -> Tensor:
        """A cache, from keys or values of all positions of the prompts."""
        batch, heads, _, size = kv.shape
        return ops.concat(
            [kv, ops.init((batch, heads, self.max_new_tokens, size), kv.dtype)], POSITIONS
        )

    def cache_index(self, position: Tensor) -> Tensor:
        """The slot of a new token."""
        return position + self.prompt_length

    def key_positions(self, position: Tensor, last: Tensor) -> Tensor:
        """The positions of all slots: int32 (batch, slots).

        A prompt's last word and what comes after it in the prompts' slots are nowhere.
        """
        last = last.reshape((-1, 1))
        index = np.arange(self.prompt_length + self.max_new_tokens)[None]
        prompt_length = popxl.constant(np.minimum(index, self.prompt_length), popxl.int32, "slots")
        new = popxl.constant(np.maximum(index - self.prompt_length, 0), popxl.int32, "new_slots")
        is_new = popxl.constant(index >= self.prompt_length, popxl.bool, "is_new")
        of_prompt = ops.where(ops.greater(last, prompt_length), prompt_length, _empty_position())
        return ops.where(is_new, last + new, of_prompt)


@dataclass(frozen=True)
class SlidingWindowCacheLayout(KVCacheLayout):
    """Slots for as many positions as a layer's window sees.

    Each sample's latest positions before its last word lie in the slots in order. A new token takes
    the place of the one that leaves the window, which is in the same slot for all samples.
    """

    window: int = 1

    def init_cache(self, kv: Tensor, last: Tensor) -> Tensor:
        batch = kv.shape[0]
        back = popxl.constant(np.arange(self.window)[None] - self.window, popxl.int32, "back")
        index = ops.maximum(last.reshape((-1, 1)) + back, popxl.constant(0, popxl.int32))
        if batch == 1:
            return ops.gather(kv, index.reshape((self.window,)), POSITIONS)
        return ops.groupedgather(kv, index, POSITIONS - 1, batch)

    def cache_index(self, position: Tensor) -> Tensor:
        turns = popxl.constant(np.arange(self.max_new_tokens) % self.window, popxl.int32, "turns")
        return ops.gather(turns, position)

    def key_positions(self, position: Tensor, last: Tensor) -> Tensor:
        """Positions of all slots; those before a text's begin are nowhere, too."""
        slots = popxl.constant(np.arange(self.window)[None], popxl.int32, "slots")
        zero, ago = popxl.constant(0, popxl.int32), self.cache_index(position) - slots
        ago = ops.where(ops.greater(zero, ago), ago + self.window, ago)
        positions = last.reshape((-1, 1)) + position - ago
        return ops.where(ops.greater(zero, positions), _empty_position(), positions)


def _empty_position() -> Tensor:
    return popxl.constant(EMPTY_POSITION, popxl.int32, "nowhere")
