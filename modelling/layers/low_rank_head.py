"""A low-rank adapter of the head, as PEFT's for `lm_head`."""

from __future__ import annotations

from config.sections import RunConfig
from modelling.layers.layer import Layer, cast
from modelling.layers.parallel import Groups
from popxl import Tensor, float32


class HeadAdapter(Layer):
    """scale * B A x, for this replica's part of the vocabulary.

    Variables, float32: `0.A` (hidden, rank), the same on all replicas; `0.B` (rank, part of the
    vocabulary), sharded.
    """

    def __init__(self, rank: int, scale: float, groups: Groups) -> None:
        super().__init__()
        self._scale = scale
        setattr(self, "0", _Matrices(rank, groups))

    def matrices(self, matrix: Tensor) -> list[Tensor]:
        """A and B beside the head's matrix, (hidden, part of the vocabulary)."""
        return list(self.get("0")(matrix))

    def add(self, logits: Tensor, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """float32 logits (..., part of the vocabulary), from x (..., hidden), with the adapter."""
        return logits + (cast(x, float32) @ a @ b) * self._scale

    @classmethod
    def of(cls, config: RunConfig, groups: Groups) -> HeadAdapter | None:
        """The adapter that a configuration gives its head; None: it gives none."""
        adapter, module = config.adapter, "lm_head"
        if not (adapter.rank and adapter.is_adapted(module, config.adapter_targets)):
            return None
        return cls(adapter.rank_of(module), adapter.scale_of(module), groups)


class _Matrices(Layer):
    def __init__(self, rank: int, groups: Groups) -> None:
        super().__init__()
        self._rank, self._groups = rank, groups

    def build(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        hidden, part = matrix.shape
        a = self.weight("A", (hidden, self._rank), float32)
        b = self.weight("B", (self._rank, part), float32, self._groups.sharded)
        return self._groups.copy_to_tp(a), b
