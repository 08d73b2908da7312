"""Low-rank adapters of the embedding and the head, as PEFT's for `embed_tokens` and `lm_head`."""

from __future__ import annotations

from modelling.layers.module import Module
from modelling.weights import WeightRow
from popxl import Tensor, float32


class VocabularyAdapter(Module):
    """scale * A B of a linear map from or to the vocabulary, a part of which is on each replica.

    Variables, float32: `0.A` (in, rank) and `0.B` (rank, out). The one that has the vocabulary is
    sharded, the other is the same on all replicas.

    Args:
        row: of the map's weight, which names its one adapter.
    """

    def __init__(self, row: WeightRow) -> None:
        super().__init__()
        (adapter,) = row.adapters
        self._scale = adapter.scale
        setattr(self, "0", _Matrices(adapter.rank, adapter.embeds))

    def matrices(self, matrix: Tensor) -> list[Tensor]:
        """A and scale * B beside the map's matrix, (in, out)."""
        a, b = self.get("0")(matrix)
        return [a, b * self._scale]


class _Matrices(Module):
    def __init__(self, rank: int, embeds: bool) -> None:
        super().__init__()
        self._rank, self._embeds = rank, embeds

    def build(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        groups, (inputs, outputs) = self.groups, matrix.shape
        cut_in, cut_out = (groups.sharded, None) if self._embeds else (None, groups.sharded)
        a = self.variable("A", (inputs, self._rank), float32, cut_in)
        b = self.variable("B", (self._rank, outputs), float32, cut_out)
        return (a, groups.copy_to_tp(b)) if self._embeds else (groups.copy_to_tp(a), b)
