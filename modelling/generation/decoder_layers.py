"""The layers of a decoder alone, with key/value caches: reading prompts, and at one position.

Prompts are padded on the right and have different lengths. `Slots` says where keys and values are
kept. Attention goes by positions; slots with padding have one beyond any query's.
"""

from __future__ import annotations

from collections.abc import Sequence

from modelling.generation.caches import Slots, put
from modelling.generation.prompts import repeated
from modelling.generation.wrapped import Wrapped
from modelling.layers import DecoderLayer
from popxl import Tensor


class Prefill(Wrapped):
    """A layer that reads prompts, each for several sequences."""

    layer: DecoderLayer

    def __init__(self, layer: DecoderLayer, slots: Slots, sequences: int) -> None:
        super().__init__(layer)
        self._slots, self._sequences = slots, sequences

    def build(self, x: Tensor, last: Tensor) -> tuple[Tensor, ...]:
        """x: (batch, length, hidden) -> the same shape, and each sequence's keys and values.

        Args:
            last: see `Slots`.
        """
        caches: list[Tensor] = []

        def attend(opened: Tensor) -> Tensor:
            attended, *read = self.layer.attention.read(opened)
            caches.extend(repeated(self._slots.begin(t, last), self._sequences) for t in read)
            return attended

        return self.layer.around(x, attend), *caches


class Decode(Wrapped):
    """A layer that reads one token of each sequence."""

    layer: DecoderLayer

    def build(
        self,
        x: Tensor,
        caches: Sequence[Tensor],
        slot: Tensor,
        places: Sequence[Tensor],
        tables: Sequence[Tensor],
    ) -> tuple[Tensor, ...]:
        """x: (batch, 1, hidden) -> the same shape, and `caches` with this position's key and value.

        Args:
            caches: keys and values, (batch, heads, slots, head_size) each.
            slot: of this position in the caches, int32 scalar.
            places: positions of the queries and of all slots, int32 (batch, 1) and (batch, slots).
            tables: angles of the positions, see `tables_at`; none if there are none.
        """
        attention = self.layer.attention
        updated: list[Tensor] = []

        def attend(opened: Tensor) -> Tensor:
            query, *new = attention.project(opened, tuple(tables) or None)
            updated.extend(put(caches, slot, new))
            keys, values = updated
            return attention.merge(attention.attend(query, keys, values, places=places))

        return self.layer.around(x, attend), *updated
