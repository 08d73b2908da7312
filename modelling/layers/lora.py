"""LoRA (Hu et al., arXiv:2106.09685): what a model computes with adapters beside frozen weights.

The variables of adapters, float32, have rows in the weight map (`modelling.weights.lora`), which
say how they are sharded: with a matrix whose input features are sharded lora_A is, else lora_B. The
other is the same on all replicas, each of which uses it for a part of the work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

import popxl
from config.sections import RunConfig
from modelling.layers.dropout import NO_DROPOUT, Dropout
from modelling.layers.kinds import LayerModules
from modelling.layers.module import Module, cast, declare
from modelling.weights import LoraSpec, WeightMap, WeightMapping
from modelling.weights.lora import add_adapters
from modelling.weights.mapping import is_vocabulary
from modelling.weights.weight_map import EMBEDDINGS
from popxl import Tensor, float32, ops

Item = TypeVar("Item")
ModuleT = TypeVar("ModuleT", bound=Module)
Rows = Mapping[str, WeightMapping]
"""Rows of the weight map, by path."""

_TAG = 0xADA
"""Tells the seeds of adapters from those that a layer makes for itself."""


class LowRankMatrices(Module):
    """Variables of an adapter, as far as it has them: lora_A, lora_B, and DoRA's magnitude."""

    lora_A: Tensor
    lora_B: Tensor
    magnitude: Tensor

    def __init__(self, adapter: LoraSpec, rows: Rows) -> None:
        super().__init__()
        self.scale = adapter.scale
        for name in LowRankMatrices.__annotations__:
            if f"{adapter.path}.{name}" in rows:
                setattr(self, name, declare(rows[f"{adapter.path}.{name}"]))


class LoRA(LowRankMatrices):
    """W x + scale * B A dropout(x), for this replica's part of a linear map's weight W.

    With DoRA (Liu et al., arXiv:2402.09353) that is multiplied by magnitude / n, where n are the
    norms of the rows of W + scale * B A, which have no gradient.

    Args:
        row: the weight's.
        owner: the adapter whose lora_A this one has; None: its own.

    Attributes:
        seed: for dropout, see `seed_adapters`.
    """

    seed: Tensor | None = None

    def __init__(
        self,
        adapter: LoraSpec,
        row: WeightMapping,
        rows: Rows,
        dropout: Dropout,
        owner: LoRA | None,
    ) -> None:
        super().__init__(adapter, rows)
        self._dora, self._dropout = adapter.dora, dropout
        self._owner = (owner or self,)  # a tuple hides it from Module's registration
        self._cut_in, self._holders = row.axis == 0, row.shard_replicas

    def build(self, x: Tensor, y: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
        """y: W x + bias -> the same with the adapter, of the same type.

        Args:
            x: float32 (..., in_features).
            matrix: W, (in_features, out_features).
            bias: (out_features,).
        """
        (owner,) = self._owner
        a, b = owner.lora_A, self.lora_B
        seed = self.groups.tp_seed(owner.seed) if self._cut_in else owner.seed
        dropped = self._dropout(x, seed)
        local_a, local_b = (a, self._open(b)) if self._cut_in else (self._open(a), b)
        more = (dropped @ local_a @ local_b) * self.scale
        wide = cast(y, float32)
        if not self._dora:
            return cast(wide + more, y.dtype)
        magnitude = self._open(self.magnitude) if self._cut_in else self.magnitude
        factor = magnitude / self._norms(matrix, a, b)
        base = wide if bias is None else wide - cast(bias, float32)
        if self._dropout.active:
            base = ops.matmul(cast(dropped, matrix.dtype), matrix, output_type=float32)
        return cast(wide + base * (factor - 1) + more * factor, y.dtype)

    def _norms(self, matrix: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """The norms of the rows of the full weight and its adapter: float32 (out_features,)."""
        full = ops.detach(cast(matrix, float32) + (a @ b) * self.scale)
        squares = ops.sum(full * full, 0)
        if self._cut_in and self.groups.tensor_parallel > 1:
            squares = ops.collectives.replicated_all_reduce(squares, "add", self.groups.tp)
        return ops.sqrt(squares)

    def _open(self, t: Tensor) -> Tensor:
        """Its gradient is the sum over the group; of what neighbours do alike, once."""
        return self.groups.scale_grad_by_shard_replicas(self.groups.copy_to_tp(t), self._holders)


class LinearAdapters(Module):
    """The adapters of a linear map, each of some of the weights that are side by side in it.

    Args:
        row: of the map's weight, which names its adapters.
        dropout: of what they read.
        owners: adapters by path, which may have lora_A for these; these are added.
    """

    def __init__(
        self, row: WeightMapping, rows: Rows, dropout: Dropout, owners: dict[str, LoRA]
    ) -> None:
        super().__init__()
        self._row, names = row, [w.name for w in row.weights]
        self._parts: list[tuple[int, LoRA | None]] = []
        of_weight = {adapter.weights[0]: adapter for adapter in row.adapters}
        while names:
            adapter, count, part = of_weight.get(names[0]), 1, None
            if adapter is not None:
                part = LoRA(adapter, row, rows, dropout, owners.get(adapter.owner))
                owners[adapter.path], count = part, len(adapter.weights)
                setattr(self, adapter.path.rpartition(".")[2], part)
            self._parts.append((count, part))
            del names[:count]

    def build(self, x: Tensor, y: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
        """Like `LoRA.build`, with all the map's outputs."""
        wide, size = cast(x, float32), y.shape[-1] // len(self._row.weights)
        if len(self._parts) == 1:
            ((_, only),) = self._parts
            return y if only is None else only(wide, y, matrix, bias)
        sizes = [count * size for count, _ in self._parts]
        ys, matrices = (ops.split(t, sizes, axis=-1) for t in (y, matrix))
        biases = [None] * len(sizes) if bias is None else ops.split(bias, sizes, axis=-1)
        adapters = [adapter for _, adapter in self._parts]
        return ops.concat(
            [
                part if adapter is None else adapter(wide, part, *others)
                for adapter, part, *others in zip(adapters, ys, matrices, biases, strict=True)
            ],
            axis=-1,
        )


class VocabularyAdapter(LowRankMatrices):
    """The adapter of a linear map from or to the vocabulary, which is sharded: PEFT's for
    `embed_tokens` and `lm_head`."""

    def __init__(self, row: WeightMapping, rows: Rows) -> None:
        (adapter,) = row.adapters
        super().__init__(adapter, rows)
        self._embeds = adapter.embeds

    def build(self) -> tuple[Tensor, Tensor]:
        """(in_features, rank) and (rank, out_features): A and scale * B, beside the map's matrix,
        of which one side is a replica's part of the vocabulary."""
        a, b, whole = self.lora_A, self.lora_B, self.groups.copy_to_tp
        a, b = (a, whole(b)) if self._embeds else (whole(a), b)
        return a, b * self.scale


class ExpertAdapter(LowRankMatrices):
    """scale * B_e A_e x for each row of x, of its expert e: PEFT's for parameters that stack
    experts' maps. Variables hold the matrices of each expert one after the other; both are sharded
    where whole experts are.

    Args:
        row: of the experts' matrices, whose input features are cut if it is transposed.
    """

    def __init__(self, row: WeightMapping, rows: Rows) -> None:
        super().__init__(row.adapters[0], rows)  # those of all experts are equal
        self._cut_in, self._shared_out = row.transpose, row.expert_parallel

    def build(self, x: Tensor, y: Tensor, sizes: Tensor, usual: int | None, rows: Tensor) -> Tensor:
        """y with the adapters, of the same type: the products of rows of x with experts' maps.

        Args:
            x: (tokens, in features), of which `rows` says each one's; or one for each of `rows`,
                where these say to which row of y each product is added.
            sizes, usual, rows: see `ops.grouped_matmul`.
        """
        wide: dict[str, Any] = {"sizes": sizes, "usual": usual}
        x, a, b = cast(x, float32) * self.scale, self.lora_A, self.lora_B
        if self._cut_in:
            inner = ops.grouped_matmul(x, a, **wide)
            more = ops.grouped_matmul(inner, self._open(b), **wide, rows=rows, into=y.shape[0])
        else:
            inner = ops.grouped_matmul(x, self._open(a), **wide, transpose=True, rows=rows)
            more = ops.grouped_matmul(inner, b, **wide, transpose=True)
        return cast(cast(y, float32) + more, y.dtype)

    def _open(self, t: Tensor) -> Tensor:
        return t if self._shared_out else self.groups.copy_to_tp(t)


class TrainableTokenRows(Module):
    """A matrix with other rows for some tokens: PEFT's trainable tokens.

    Variables, float32: `delta` (tokens, hidden), the same on all replicas.

    Args:
        tokens: their numbers, in the order of the rows of `delta`.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        super().__init__()
        self._tokens = np.asarray(tokens, np.int32)

    def build(self, matrix: Tensor, transposed: bool = False) -> Tensor:
        """(rows, hidden) -> the same shape, of this replica's part of the vocabulary.

        Args:
            transposed: it is (hidden, rows), before and after.
        """
        rows, hidden = matrix.shape[::-1] if transposed else matrix.shape
        delta = self.variable("delta", (len(self._tokens), hidden), float32)
        places: Tensor = popxl.constant(np.arange(rows).reshape(rows, 1), popxl.int32, "rows")
        if self.groups.tensor_parallel > 1:
            places = places + self.groups.tp_rank() * rows
        tokens = popxl.constant(self._tokens.reshape(1, -1), popxl.int32, "tokens")
        chosen = cast(ops.equal(places, tokens), float32)  # (rows, tokens)
        frozen = 1.0 - ops.sum(chosen, 1, keepdims=True)
        new = ops.matmul(chosen, self.groups.copy_to_tp(delta))
        if transposed:
            frozen, new = frozen.transpose((1, 0)), new.transpose((1, 0))
        return cast(cast(matrix, float32) * frozen + new, matrix.dtype)


class LayerAdapters:
    """The adapters of a model's layers.

    Args:
        table_of: makes the family's table.
    """

    def __init__(self, config: RunConfig, weight_map_of: Callable[[Any], WeightMap]) -> None:
        self._layers: Mapping[str, Sequence[WeightMapping]] = {}
        self._groups = config.execution.expert_groups
        if config.adapter.rank:
            full = replace(config, execution=replace(config.execution, expert_groups=1))
            weight_map = add_adapters(weight_map_of(full), config.adapter, config.adapter_targets)
            self._layers = weight_map.layers
        self._dropout = NO_DROPOUT if config.model.eval else Dropout(config.adapter.dropout)

    def attach(self, module: ModuleT, *layers: str) -> ModuleT:
        """A layer with those of its rows in the table; a part of a layer with those it has maps
        for.

        Args:
            layers: its name, and those of others that it has maps of.
        """
        return self._with(module, [row for layer in layers for row in self._layers.get(layer, ())])

    def attach_to_experts(self, group: ModuleT, layer: str) -> ModuleT:
        """A group of a layer's experts with theirs; all groups have equal ones."""
        rows = [row for row in self._layers.get(layer, ()) if ".experts." in row.path]
        return self._with(group, [row.expert_slice(0, self._groups) for row in rows])

    def _with(self, module: ModuleT, layer: Sequence[WeightMapping]) -> ModuleT:
        rows = {row.path: row for row in layer}
        owners: dict[str, LoRA] = {}
        for row in (row for row in layer if row.adapters):
            *path, name, _ = row.path.split(".")
            around = _at(module, path)
            of_map = _at(around, [name])
            if row.expert_matrices and around is not None:
                setattr(around, f"{name}_adapter", ExpertAdapter(row, rows))
            elif of_map is not None and is_vocabulary(row):
                of_map.adapters = VocabularyAdapter(row, rows)
            elif of_map is not None:
                of_map.adapters = LinearAdapters(row, rows, self._dropout, owners)
        module.dropout_adapters = tuple(owners.values()) if self._dropout.active else ()
        return module

    def attach_to_embeddings(self, module: ModuleT) -> ModuleT:
        """A model's embeddings with their adapters."""
        return self.attach(module, EMBEDDINGS)

    def attach_to_head(self, module: ModuleT) -> ModuleT:
        """A model's head with its adapters: one that is the embedding has the embedding's."""
        return self.attach(module, "head", EMBEDDINGS)

    def build_layers(
        self, names: Sequence[str], types: Sequence[Item], make: Callable[[Item], Module]
    ) -> LayerModules:
        """Layers with their adapters: those that differ in these are of different kinds.

        Args:
            names: of each layer in turn.
            types: of each layer in turn, without adapters.
            make: a new module of a type.
        """
        rows = [self._layers.get(name, ()) for name in names]
        forms = [tuple(a.graph_key for row in layer for a in row.adapters) for layer in rows]
        kinds = list(zip(types, forms, strict=True))
        return LayerModules.from_types(
            kinds, lambda kind: self.attach(make(kind[0]), names[kinds.index(kind)])
        )


def seed_adapters(layer: Module, seed: Tensor | None) -> None:
    """Give each adapter of a layer a seed for dropout, made from the layer's."""
    if layer.dropout_adapters:
        assert seed is not None, "dropout needs a seed"
        own = ops.create_random_seed(seed, popxl.constant(_TAG, popxl.uint32))
        seeds = ops.split_random_seed(own, len(layer.dropout_adapters))
        for adapter, is_adapter in zip(layer.dropout_adapters, seeds, strict=True):
            adapter.seed = is_adapter


def _at(module: Any, path: Sequence[str]) -> Any:
    for name in path:
        module = getattr(module, name, None)
    return module
