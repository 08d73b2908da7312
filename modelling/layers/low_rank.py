"""Low-rank adapters of linear maps (LoRA, Hu et al., arXiv:2106.09685)."""

from __future__ import annotations

from typing import Any

import popxl
from modelling.layers.dropout import NO_DROPOUT, Dropout
from modelling.layers.low_rank_experts import ExpertAdapter
from modelling.layers.low_rank_vocabulary import VocabularyAdapter
from modelling.layers.module import Module, cast
from modelling.weights import LowRank, WeightRow
from modelling.weights.row import is_of_vocabulary
from popxl import Tensor, ops

_TAG = 0xADA
"""Tells the seeds of adapters from those that a layer makes for itself."""


class Adapter(Module):
    """W x + scale * B A dropout(x), for this replica's part of a linear map's weight W.

    With DoRA (Liu et al., arXiv:2402.09353) that is multiplied by m / n, where n are the norms of
    the rows of W + scale * B A, which have no gradient.

    Where the weight's input features are cut, so are those of A, and each replica has a part of the
    sum; else the outputs of B and m. The others are whole on all replicas, each of which uses them
    for a part of the work.

    Variables, float32: `A` (in_features, rank), unless `owner` has it; `B` (rank, out_features);
    with DoRA `m` (out_features,).

    Args:
        row: the weight's.
        owner: the adapter whose A this one has.

    Attributes:
        seed: for dropout, see `seed_adapters`.
    """

    seed: Tensor | None = None

    def __init__(
        self,
        adapter: LowRank,
        row: WeightRow,
        dropout: Dropout,
        owner: Adapter | None = None,
    ) -> None:
        super().__init__()
        self._of, self._dropout = adapter, dropout
        self._owners = () if owner is None else (owner,)  # not a part of this module
        self._cut_in, self._holders = row.axis == 0, row.holders

    def build(self, x: Tensor, y: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
        """y: W x + bias -> the same with the adapter, of the same type.

        Args:
            x: float32 (..., in_features).
            matrix: W, (in_features, out_features).
            bias: (out_features,).
        """
        cut = self.groups.held_by(self._holders)
        inside, outside = (cut, None) if self._cut_in else (None, cut)
        rank, float32 = self._of.rank, popxl.float32
        shared = [owner.get("A") for owner in self._owners]
        a = shared[0] if shared else self.variable("A", (x.shape[-1], rank), float32, inside)
        b = self.variable("B", (rank, y.shape[-1]), float32, outside)
        dropped = self._dropout(x, self._seed())
        own_a, own_b = (a, self._open(b)) if self._cut_in else (self._open(a), b)
        more = (dropped @ own_a @ own_b) * self._of.scale
        wide = cast(y, float32)
        if not self._of.dora:
            return cast(wide + more, y.dtype)
        m = self.variable("m", y.shape[-1:], float32, outside)
        factor = (self._open(m) if self._cut_in else m) / self._norms(matrix, a, b)
        base = wide if bias is None else wide - cast(bias, float32)
        if self._dropout.active:
            base = ops.matmul(cast(dropped, matrix.dtype), matrix, output_type=float32)
        return cast(wide + base * (factor - 1) + more * factor, y.dtype)

    def _norms(self, matrix: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """The norms of the rows of the whole weight and its adapter: float32 (out_features,)."""
        whole = ops.detach(cast(matrix, popxl.float32) + (a @ b) * self._of.scale)
        squares = ops.sum(whole * whole, 0)
        if self._cut_in and self.groups.tensor_parallel > 1:
            squares = ops.collectives.replicated_all_reduce(squares, "add", self.groups.tp)
        return ops.sqrt(squares)

    def _open(self, t: Tensor) -> Tensor:
        """Its gradient is the sum over the group; of what neighbours do alike, once."""
        return self.groups.share_held(self.groups.copy_to_tp(t), self._holders)

    def _seed(self) -> Tensor | None:
        """The seed of the adapter that has A: for both, what A reads is the same."""
        (seed,) = [owner.seed for owner in self._owners] or [self.seed]
        return self.groups.own_seed(seed) if self._cut_in else seed


class Adapters(Module):
    """Adds what the adapters of a linear map give to its result.

    Args:
        row: of the map's weight, which names its adapters.
        dropout: of what they read.
        owners: adapters by path, which may have an A for these; these are added.
    """

    def __init__(self, row: WeightRow, dropout: Dropout, owners: dict[str, Adapter]) -> None:
        super().__init__()
        self._row, names = row, [w.name for w in row.weights]
        self._parts: list[tuple[int, Adapter | None]] = []
        of_weight = {adapter.weights[0]: adapter for adapter in row.adapters}
        while names:
            found = of_weight.get(names[0])
            made = None
            if found is not None:
                made = Adapter(found, row, dropout, owners.get(found.owner))
                owners[found.path] = made
                setattr(self, found.path.rpartition(".")[2], made)
            count = 1 if found is None else len(found.weights)
            self._parts.append((count, made))
            del names[:count]

    def build(self, x: Tensor, y: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
        """Like `Adapter.build`, with all the map's outputs."""
        wide, size = cast(x, popxl.float32), y.shape[-1] // len(self._row.weights)
        if len(self._parts) == 1:
            ((_, only),) = self._parts
            return y if only is None else only(wide, y, matrix, bias)
        sizes = [count * size for count, _ in self._parts]
        parts, matrices = (ops.split(t, sizes, axis=-1) for t in (y, matrix))
        biases = [None] * len(sizes) if bias is None else ops.split(bias, sizes, axis=-1)
        return ops.concat(
            [
                part if adapter is None else adapter(wide, part, *own)
                for part, (_, adapter), *own in zip(
                    parts, self._parts, matrices, biases, strict=True
                )
            ],
            axis=-1,
        )


def adapt(layer: Module, rows: tuple[WeightRow, ...], dropout: Dropout = NO_DROPOUT) -> None:
    """Give the maps of a layer the adapters that its rows name, as far as it has the maps.

    Args:
        dropout: of what adapters read; it needs `seed_adapters`.
    """
    owners: dict[str, Adapter] = {}
    for row in (row for row in rows if row.adapters):
        *path, name, _ = row.path.split(".")
        around = _at(layer, path)
        of_map = _at(around, [name])
        if row.experts and around is not None:
            setattr(around, f"{name}_adapter", ExpertAdapter(row))
        elif of_map is not None and is_of_vocabulary(row):
            of_map.adapters = VocabularyAdapter(row)
        elif of_map is not None:
            of_map.adapters = Adapters(row, dropout, owners)
    layer.inside = tuple(owners.values()) if dropout.active else ()


def seed_adapters(layer: Module, seed: Tensor | None) -> None:
    """Give each adapter that `adapt` gave to a layer a seed for dropout, made from the layer's."""
    if layer.inside:
        assert seed is not None, "dropout needs a seed"
        own = ops.create_random_seed(seed, popxl.constant(_TAG, popxl.uint32))
        seeds = ops.split_random_seed(own, len(layer.inside))
        for adapter, of_adapter in zip(layer.inside, seeds, strict=True):
            adapter.seed = of_adapter


def _at(module: Any, path: list[str]) -> Any:
    for name in path:
        module = getattr(module, name, None)
    return module
