"""Contexts of a decoder's blocks with key/value caches: reading prompts, and one token.

Prompts are padded on the right and have different lengths. `Slots` says where keys and values are
kept. Attention goes by positions; slots with padding have one beyond any query's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from modelling.generation.kv_cache import Slots, put
from modelling.generation.prompts import repeated
from modelling.layers import Context, Module, Tables, tables_at
from modelling.layers.wrapped import Wrapped
from popxl import Tensor


class PromptContext(Context):
    """The context of prompts, each for several sequences.

    Args:
        prompt, room: see `Slots`.
        last: see `Slots`.
        sequences: of a prompt.

    Attributes:
        caches: keys and values of each sequence, once the block is built.
    """

    def __init__(self, prompt: int, room: int, last: Tensor, sequences: int) -> None:
        super().__init__()
        self._prompt, self._room, self._last, self._sequences = prompt, room, last, sequences
        self.max_length = prompt + room
        self.caches: list[Tensor] = []

    def update_cache(self, k: Tensor, v: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
        slots = Slots.of(self._prompt, self._room, window)
        self.caches = [repeated(slots.begin(t, self._last), self._sequences) for t in (k, v)]
        return k, v


class TokenContext(Context):
    """The context of one token of each sequence.

    Args:
        caches: keys and values of the tokens before, (sequences, heads, slots, head_dim) each.
        prompt, room, last: see `Slots`.
        position: in the loop, int32 scalar.

    Attributes:
        caches: with the token's, once the block is built.
    """

    def __init__(
        self, caches: Sequence[Tensor], prompt: int, room: int, last: Tensor, position: Tensor
    ) -> None:
        super().__init__()
        self._prompt, self._room, self._last, self._position = prompt, room, last, position
        self.max_length = prompt + room
        self.caches = list(caches)

    def tables(self, make: Callable[[int], Tables], length: int) -> Tables:
        return tables_at(make(self._prompt + self._room), self._last + self._position)

    def positions(self, window: int | None) -> Sequence[Tensor]:
        place = self._last + self._position
        slots = Slots.of(self._prompt, self._room, window)
        return [place.reshape((-1, 1)), slots.places(self._position, self._last)]

    def update_cache(self, k: Tensor, v: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
        slot = Slots.of(self._prompt, self._room, window).slot(self._position)
        self.caches = put(self.caches, slot, [k, v])
        return self.caches[0], self.caches[1]


class Prefill(Wrapped):
    """A block that reads prompts.

    Args:
        prompt, room, sequences: see `PromptContext`.
    """

    def __init__(self, layer: Module, prompt: int, room: int, sequences: int) -> None:
        super().__init__(layer)
        self._prompt, self._room, self._sequences = prompt, room, sequences

    def build(self, x: Tensor, last: Tensor) -> tuple[Tensor, ...]:
        """x: (batch, length, hidden) -> the same shape, and each sequence's keys and values.

        Args:
            last: see `Slots`.
        """
        ctx = PromptContext(self._prompt, self._room, last, self._sequences)
        return self.layer(x, ctx), *ctx.caches


class Decode(Wrapped):
    """A block that reads one token of each sequence.

    Args:
        prompt, room: see `TokenContext`.
    """

    def __init__(self, layer: Module, prompt: int, room: int) -> None:
        super().__init__(layer)
        self._prompt, self._room = prompt, room

    def build(
        self, x: Tensor, caches: Sequence[Tensor], last: Tensor, position: Tensor
    ) -> tuple[Tensor, ...]:
        """x: (sequences, 1, hidden) -> the same shape, and `caches` with this token's.

        Args:
            caches, last, position: see `TokenContext`.
        """
        ctx = TokenContext(caches, self._prompt, self._room, last, position)
        return self.layer(x, ctx), *ctx.caches
