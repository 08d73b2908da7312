"""Key/value caches: what a layer keeps of the positions it has read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

import popxl
from popxl import Tensor, ops

POSITIONS = 2
"""Axis of the positions in keys and values, (batch, heads, positions, head_size)."""

NOWHERE = 2**30
"""Position of a slot that holds nothing: every query comes before it."""


def put(caches: Sequence[Tensor], slot: Tensor, new: Sequence[Tensor]) -> list[Tensor]:
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


def continued(caches: Sequence[Tensor], parents: Sequence[Tensor]) -> list[Tensor]:
    """The caches of the sequences that are continued.

    Args:
        parents: none, or `Advance.parents` alone.
    """
    return [ops.gather(cache, p) for cache in caches for p in parents] or list(caches)


@dataclass(frozen=True)
class Slots:
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

    prompt: int
    room: int

    @classmethod
    def of(cls, prompt: int, room: int, window: int | None = None) -> Slots:
        """Slots for layers that see `window` positions, their own included; None: all."""
        if window is None or window >= prompt + room:
            return Slots(prompt, room)
        return Ring(prompt, room, window)

    def begin(self, read: Tensor, last: Tensor) -> Tensor:
        """A cache, from keys or values of all positions of the prompts."""
        batch, heads, _, size = read.shape
        return ops.concat([read, ops.init((batch, heads, self.room, size), read.dtype)], POSITIONS)

    def slot(self, position: Tensor) -> Tensor:
        """The slot of a new token."""
        return position + self.prompt

    def places(self, position: Tensor, last: Tensor) -> Tensor:
        """The positions of all slots: int32 (batch, slots).

        A prompt's last word and what comes after it in the prompts' slots are nowhere.
        """
        last = last.reshape((-1, 1))
        index = np.arange(self.prompt + self.room)[None]
        prompt = popxl.constant(np.minimum(index, self.prompt), popxl.int32, "slots")
        new = popxl.constant(np.maximum(index - self.prompt, 0), popxl.int32, "new_slots")
        is_new = popxl.constant(index >= self.prompt, popxl.bool, "is_new")
        of_prompt = ops.where(ops.greater(last, prompt), prompt, _nowhere())
        return ops.where(is_new, last + new, of_prompt)


@dataclass(frozen=True)
class Ring(Slots):
    """Slots for as many positions as a layer's window sees.

    Each sample's latest positions before its last word lie in the slots in order. A new token takes
    the place of the one that leaves the window, which is in the same slot for all samples.
    """

    window: int = 1

    def begin(self, read: Tensor, last: Tensor) -> Tensor:
        batch = read.shape[0]
        back = popxl.constant(np.arange(self.window)[None] - self.window, popxl.int32, "back")
        index = ops.maximum(last.reshape((-1, 1)) + back, popxl.constant(0, popxl.int32))
        if batch == 1:
            return ops.gather(read, index.reshape((self.window,)), POSITIONS)
        return ops.groupedgather(read, index, POSITIONS - 1, batch)

    def slot(self, position: Tensor) -> Tensor:
        turns = popxl.constant(np.arange(self.room) % self.window, popxl.int32, "turns")
        return ops.gather(turns, position)

    def places(self, position: Tensor, last: Tensor) -> Tensor:
        """Positions of all slots; those before a text's begin are nowhere, too."""
        slots = popxl.constant(np.arange(self.window)[None], popxl.int32, "slots")
        zero, ago = popxl.constant(0, popxl.int32), self.slot(position) - slots
        ago = ops.where(ops.greater(zero, ago), ago + self.window, ago)
        positions = last.reshape((-1, 1)) + position - ago
        return ops.where(ops.greater(zero, positions), _nowhere(), positions)


def _nowhere() -> Tensor:
    return popxl.constant(NOWHERE, popxl.int32, "nowhere")
