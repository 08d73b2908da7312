"""LoRA (Hu et al., arXiv:2106.09685) and DoRA: trainable adapters of frozen weights.

The variables of adapters, float32, have mappings in the weight map (`modelling.weights.lora`). If
the frozen weight's input features are sharded, lora_A is sharded, else lora_B. The other matrix is
equal on all replicas, each of which uses it for a part of the work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

import popxl
from config.sections import RunConfig
from modelling.layers.dropout import NO_DROPOUT, Dropout
from modelling.layers.layer_modules import LayerModules
from modelling.layers.module import Module, cast_if_needed, declare_variable
from modelling.weights import LoraSpec, WeightMap, WeightMapping
from modelling.weights.weight_map import EMBEDDINGS
from modelling.weights.weight_mapping import is_vocabulary
from popxl import Tensor, float32, ops

LayerTypeT = TypeVar("LayerTypeT")
ModuleT = TypeVar("ModuleT", bound=Module)
MappingsByPath = Mapping[str, WeightMapping]

_SEED_TAG = 0xADA
"""Separates the seeds of adapters from those that a block derives for itself."""


class LowRankMatrices(Module):
    """Base class with an adapter's variables: lora_A, lora_B, DoRA's magnitude if present."""

    lora_A: Tensor
    lora_B: Tensor
    magnitude: Tensor

    def __init__(self, adapter: LoraSpec, mappings: MappingsByPath) -> None:
        super().__init__()
        self.scale = adapter.scale
        for name in LowRankMatrices.__annotations__:
            if f"{adapter.path}.{name}" in mappings:
                setattr(self, name, declare_variable(mappings[f"{adapter.path}.{name}"]))


class LoRA(LowRankMatrices):
    """LoRA adapter: y + scale * B A dropout(x), for a replica's shard of a linear layer y = W x.

    DoRA (Liu et al., arXiv:2402.09353) multiplies that by magnitude / n, where n are the norms of
    the rows of W + scale * B A, which have no gradient.

    Args:
        mapping: of W.
        lora_a_owner: the adapter whose lora_A this one uses; None: it has its own.

    Attributes:
        seed: uint32 (2,) for dropout, see `seed_adapters`.
    """

    seed: Tensor | None = None

    def __init__(
        self,
        adapter: LoraSpec,
        mapping: WeightMapping,
        mappings: MappingsByPath,
        dropout: Dropout,
        lora_a_owner: LoRA | None,
    ) -> None:
        super().__init__(adapter, mappings)
        self._dora, self._dropout = adapter.dora, dropout
        self._lora_a_owner = (lora_a_owner or self,)  # a tuple hides it from Module's registration
        self._is_input_sharded = mapping.axis == 0
        self._shard_replicas = mapping.shard_replicas

    def build(self, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Adds the adapter's output to the linear layer's output y.

        Args:
            x: float32 (..., in_features).
            y: x @ weight + bias, (..., out_features).
            weight: W transposed, (in_features, out_features).
            bias: (out_features,).

        Returns:
            The shape and dtype of y.
        """
        (owner,) = self._lora_a_owner
        a, b = owner.lora_A, self.lora_B
        seed = self.groups.tp_seed(owner.seed) if self._is_input_sharded else owner.seed
        dropped = self._dropout(x, seed)
        if self._is_input_sharded:
            local_a, local_b = a, self._copy_to_tp(b)
        else:
            local_a, local_b = self._copy_to_tp(a), b
        delta = (dropped @ local_a @ local_b) * self.scale
        y_float32 = cast_if_needed(y, float32)
        if not self._dora:
            return cast_if_needed(y_float32 + delta, y.dtype)
        magnitude = self.magnitude
        if self._is_input_sharded:
            magnitude = self._copy_to_tp(magnitude)
        factor = magnitude / self._row_norms(weight, a, b)
        base = y_float32 if bias is None else y_float32 - cast_if_needed(bias, float32)
        if self._dropout.is_active:
            base = ops.matmul(cast_if_needed(dropped, weight.dtype), weight, output_type=float32)
        return cast_if_needed(y_float32 + base * (factor - 1) + delta * factor, y.dtype)

    def _row_norms(self, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Computes DoRA's norms of the rows of W + scale * B A: float32 (out_features,)."""
        merged = ops.detach(cast_if_needed(weight, float32) + (a @ b) * self.scale)
        squares = ops.sum(merged * merged, 0)
        if self._is_input_sharded and self.groups.tensor_parallel > 1:
            squares = ops.collectives.replicated_all_reduce(squares, "add", self.groups.tp)
        return ops.sqrt(squares)

    def _copy_to_tp(self, t: Tensor) -> Tensor:
        """Returns `t`; its gradient is summed over the group, each distinct shard once."""
        groups = self.groups
        return groups.scale_grad_by_shard_replicas(groups.copy_to_tp(t), self._shard_replicas)


class LinearAdapters(Module):
    """All adapters of a linear layer, each for one or more of the weights fused in it.

    Args:
        mapping: of the layer's weight, which names its adapters.
        dropout: of the adapters' input.
        lora_a_owners: adapters by path whose lora_A others may use; these are added.
    """

    def __init__(
        self,
        mapping: WeightMapping,
        mappings: MappingsByPath,
        dropout: Dropout,
        lora_a_owners: dict[str, LoRA],
    ) -> None:
        super().__init__()
        self._mapping, names = mapping, [w.name for w in mapping.weights]
        self._parts: list[tuple[int, LoRA | None]] = []  # numbers of weights and their adapter
        spec_of_weight = {spec.weights[0]: spec for spec in mapping.adapters}
        while names:
            spec, count, lora = spec_of_weight.get(names[0]), 1, None
            if spec is not None:
                lora = LoRA(spec, mapping, mappings, dropout, lora_a_owners.get(spec.owner))
                lora_a_owners[spec.path], count = lora, len(spec.weights)
                setattr(self, spec.path.rpartition(".")[2], lora)
            self._parts.append((count, lora))
            del names[:count]

    def build(self, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Adds the adapters' outputs to the linear layer's output; shapes as for `LoRA.build`."""
        x_float32, size = cast_if_needed(x, float32), y.shape[-1] // len(self._mapping.weights)
        if len(self._parts) == 1:
            ((_, only),) = self._parts
            return y if only is None else only(x_float32, y, weight, bias)
        sizes = [count * size for count, _ in self._parts]
        ys, weights = (ops.split(t, sizes, axis=-1) for t in (y, weight))
        biases = [None] * len(sizes) if bias is None else ops.split(bias, sizes, axis=-1)
        loras = [lora for _, lora in self._parts]
        parts = zip(loras, ys, weights, biases, strict=True)
        return ops.concat(
            [y if lora is None else lora(x_float32, y, w, b) for lora, y, w, b in parts], axis=-1
        )


class VocabularyAdapter(LowRankMatrices):
    """Adapter of `embed_tokens` or `lm_head`, whose vocabulary axis is sharded."""

    def __init__(self, mapping: WeightMapping, mappings: MappingsByPath) -> None:
        (adapter,) = mapping.adapters
        super().__init__(adapter, mappings)
        self._is_embedding = adapter.embeds

    def build(self) -> tuple[Tensor, Tensor]:
        """Returns the adapter's A, (in_features, rank), and scale * B, (rank, out_features).

        The vocabulary, one of the two features, is local.
        """
        a, b = self.lora_A, self.lora_B
        if self._is_embedding:
            b = self.groups.copy_to_tp(b)
        else:
            a = self.groups.copy_to_tp(a)
        return a, b * self.scale


class ExpertAdapter(LowRankMatrices):
    """Adapter of stacked expert weights: adds scale * B_e A_e x for each row x of expert e.

    It is PEFT's adapter of a parameter that stacks the experts' matrices.

    Variables stack the matrices of each expert; with expert parallelism both are sharded.

    Args:
        mapping: of the experts' matrices, whose input features are sharded if it is transposed.
    """

    def __init__(self, mapping: WeightMapping, mappings: MappingsByPath) -> None:
        super().__init__(mapping.adapters[0], mappings)  # those of all experts are equal
        self._is_down = mapping.transpose
        self._is_expert_parallel = mapping.expert_parallel

    def build(
        self,
        x: Tensor,
        y: Tensor,
        group_sizes: Tensor,
        expected_rows: int | None,
        rows: Tensor,
    ) -> Tensor:
        """Adds the adapters' outputs to the experts' output y, of the same shape and dtype.

        Args:
            x: (tokens, in features), from which `rows` are taken; of a down projection (rows, in
                features), and `rows` are the rows of y to which each product is added.
            group_sizes, expected_rows, rows: see `ops.grouped_matmul`.
        """
        groups: dict[str, Any] = {"sizes": group_sizes, "expected_rows": expected_rows}
        x, a, b = cast_if_needed(x, float32) * self.scale, self.lora_A, self.lora_B
        if self._is_down:
            low_rank = ops.grouped_matmul(x, a, **groups)
            b, tokens = self._copy_to_tp(b), y.shape[0]
            delta = ops.grouped_matmul(low_rank, b, **groups, rows=rows, num_out_rows=tokens)
        else:
            a = self._copy_to_tp(a)
            low_rank = ops.grouped_matmul(x, a, **groups, transpose=True, rows=rows)
            delta = ops.grouped_matmul(low_rank, b, **groups, transpose=True)
        return cast_if_needed(cast_if_needed(y, float32) + delta, y.dtype)

    def _copy_to_tp(self, t: Tensor) -> Tensor:
        return t if self._is_expert_parallel else self.groups.copy_to_tp(t)


class TrainableTokenRows(Module):
    """Replaces some rows of a frozen embedding or head by trainable ones (PEFT's trainable tokens).

    Variables, float32: `delta` (tokens, hidden), equal on all replicas.

    Args:
        token_ids: in the order of the rows of `delta`.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        super().__init__()
        self._token_ids = np.asarray(token_ids, np.int32)

    def build(self, matrix: Tensor, transposed: bool = False) -> Tensor:
        """Puts the trainable rows into `matrix`: (local vocab size, hidden) -> the same shape.

        Args:
            transposed: it is (hidden, local vocab size), before and after.
        """
        rows, hidden = matrix.shape[::-1] if transposed else matrix.shape
        delta = self.add_parameter("delta", (len(self._token_ids), hidden), float32)
        row_ids: Tensor = popxl.constant(np.arange(rows).reshape(rows, 1), popxl.int32, "rows")
        if self.groups.tensor_parallel > 1:
            row_ids = row_ids + self.groups.tp_rank() * rows
        token_ids = popxl.constant(self._token_ids.reshape(1, -1), popxl.int32, "tokens")
        one_hot = cast_if_needed(ops.equal(row_ids, token_ids), float32)  # (rows, tokens)
        is_frozen = 1.0 - ops.sum(one_hot, 1, keepdims=True)
        replacement = ops.matmul(one_hot, self.groups.copy_to_tp(delta))
        if transposed:
            is_frozen, replacement = is_frozen.transpose((1, 0)), replacement.transpose((1, 0))
        return cast_if_needed(
            cast_if_needed(matrix, float32) * is_frozen + replacement, matrix.dtype
        )


class LayerAdapters:
    """Attaches the adapters of a weight map to the layers of a model.

    Args:
        weight_map_of: returns the family's weight map for a configuration.
    """

    def __init__(self, config: RunConfig, weight_map_of: Callable[[Any], WeightMap]) -> None:
        self._layers: Mapping[str, Sequence[WeightMapping]] = {}
        self._expert_groups = config.execution.expert_groups
        if config.adapter.rank:
            ungrouped = replace(config, execution=replace(config.execution, expert_groups=1))
            weight_map = weight_map_of(ungrouped)
            from modelling.weights.lora import add_adapters

            self._layers = add_adapters(weight_map, config.adapter, config.adapter_targets).layers
        self._dropout = NO_DROPOUT if config.model.eval else Dropout(config.adapter.dropout)

    def attach(self, module: ModuleT, *layers: str) -> ModuleT:
        """Attaches the adapters of the named layers to a module's linear layers.

        Args:
            layers: names of layers in the weight map.
        """
        return self._attach_mappings(
            module, [m for layer in layers for m in self._layers.get(layer, ())]
        )

    def attach_to_experts(self, group: ModuleT, layer: str) -> ModuleT:
        """Attaches the adapters of a layer's experts to the module of one expert group."""
        mappings = [m for m in self._layers.get(layer, ()) if ".experts." in m.path]
        return self._attach_mappings(
            group, [m.expert_group_mapping(0, self._expert_groups) for m in mappings]
        )

    def _attach_mappings(self, module: ModuleT, layer: Sequence[WeightMapping]) -> ModuleT:
        mappings = {mapping.path: mapping for mapping in layer}
        lora_a_owners: dict[str, LoRA] = {}
        for mapping in (m for m in layer if m.adapters):
            *path, name, _ = mapping.path.split(".")
            parent = _get_submodule(module, path)
            linear = _get_submodule(parent, [name])
            if mapping.expert_matrices and parent is not None:
                setattr(parent, f"{name}_adapter", ExpertAdapter(mapping, mappings))
            elif linear is not None and is_vocabulary(mapping):
                linear.adapters = VocabularyAdapter(mapping, mappings)
            elif linear is not None:
                linear.adapters = LinearAdapters(mapping, mappings, self._dropout, lora_a_owners)
        module.dropout_adapters = tuple(lora_a_owners.values()) if self._dropout.is_active else ()
        return module

    def attach_to_embeddings(self, module: ModuleT, layer: str = EMBEDDINGS) -> ModuleT:
        """Attaches the adapters of the token embedding that a layer owns."""
        return self.attach(module, layer)

    def attach_to_head(self, module: ModuleT, layer: str = EMBEDDINGS) -> ModuleT:
        """Attaches the adapters of the LM head; a tied head uses those of the layer's embedding."""
        return self.attach(module, "head", layer)

    def build_layers(
        self,
        names: Sequence[str],
        layer_types: Sequence[LayerTypeT],
        make_layer: Callable[[LayerTypeT], Module],
    ) -> LayerModules:
        """Builds layers with adapters; layers with different adapters get different types.

        Args:
            names: of each layer, in the weight map.
            layer_types: the type of each layer, apart from adapters.
            make_layer: builds a module of a type.
        """
        mappings = [self._layers.get(name, ()) for name in names]
        adapters = [tuple(a.graph_key for m in layer for a in m.adapters) for layer in mappings]
        types = list(zip(layer_types, adapters, strict=True))
        return LayerModules.from_types(
            types, lambda t: self.attach(make_layer(t[0]), names[types.index(t)])
        )


def seed_adapters(layer: Module, seed: Tensor | None) -> None:
    """Gives each adapter of a layer its own dropout seed, derived from the layer's.

    Args:
        seed: uint32 (2,).
    """
    if layer.dropout_adapters:
        assert seed is not None, "dropout needs a seed"
        adapters_seed = ops.create_random_seed(seed, popxl.constant(_SEED_TAG, popxl.uint32))
        seeds = ops.split_random_seed(adapters_seed, len(layer.dropout_adapters))
        for adapter, adapter_seed in zip(layer.dropout_adapters, seeds, strict=True):
            adapter.seed = adapter_seed


def _get_submodule(module: Any, path: Sequence[str]) -> Any:
    for name in path:
        module = getattr(module, name, None)
    return module
