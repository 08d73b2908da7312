"""Causal attention of a decoder alone, with rotary positions."""

from __future__ import annotations

from modelling.layers.attention import places_in_texts
from modelling.layers.attention_heads import AttentionHeads
from modelling.layers.rotary import Tables, tables_of_texts
from popxl import Tensor


class DecoderAttention(AttentionHeads):
    """This replica's heads, inside a sharded computation. Subclasses have `tables` and `project`.

    Generation calls `read` for prompts, and `project`, `attend` and `merge` for a token.
    """

    def build(self, x: Tensor, seed: Tensor | None = None, starts: Tensor | None = None) -> Tensor:
        """x: (batch, length, hidden) -> this replica's part of the sum, of the same shape."""
        return self.read(x, seed, starts)[0]

    def read(
        self, x: Tensor, seed: Tensor | None = None, starts: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Like `build`, and rotated keys and values, (batch, key heads, length, head size)."""
        tables = self.tables(self.axes.length(x))
        if tables is not None:
            tables = tables_of_texts(tables, starts)
        q, k, v = self.project(x, tables)
        places = () if starts is None else places_in_texts(starts)
        return self.merge(self.attend(q, k, v, seed=seed, places=places)), k, v

    def tables(self, positions: int) -> Tables | None:
        """The angles of positions 0, 1, ...; None: there are none."""
        raise NotImplementedError

    def project(self, x: Tensor, tables: Tables | None) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values: (batch, heads, length, head size) each."""
        raise NotImplementedError
