"""The modules of a model's layers, of several types and with adapters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeVar

import popxl
import popxl_addons as addons
from config.sections import RunConfig
from modelling.layers.dropout import NO_DROPOUT, Dropout
from modelling.layers.module import Module
from modelling.weights import WeightMap, WeightMapping
from modelling.weights.weight_map import EMBEDDINGS
from modelling.weights.weight_mapping import is_vocabulary
from popxl import Tensor, ops

if TYPE_CHECKING:
    from modelling.layers.lora import LoRA, TrainableTokenRows

Item = TypeVar("Item")
LayerTypeT = TypeVar("LayerTypeT")
ModuleT = TypeVar("ModuleT", bound=Module)

_SEED_TAG = 0xADA
"""Separates the seeds of adapters from those that a block derives for itself."""


@dataclass(frozen=True)
class LayerModules:
    """A model's layers: one module for each distinct layer type, and the type of each layer.

    Types are such as sliding-window and full attention.

    Attributes:
        modules: one for each layer type; all have the same variables, except for adapters.
        type_of_layer: for each layer, the index of its type in `modules`.
    """

    modules: Sequence[addons.Module]
    type_of_layer: Sequence[int]

    @classmethod
    def from_types(
        cls, layer_types: Sequence[Item], make_layer: Callable[[Item], addons.Module]
    ) -> LayerModules:
        """Creates one module for each distinct layer type.

        Args:
            layer_types: the type of each layer.
            make_layer: creates the module of a type.
        """
        types = list(dict.fromkeys(layer_types))
        return cls([make_layer(t) for t in types], [types.index(t) for t in layer_types])

    def slice_layers(self, layers: range) -> LayerModules:
        """Returns the layers of a range of indices, with the modules of their types."""
        types = self.type_of_layer[layers.start : layers.stop]
        return LayerModules.from_types(types, self.modules.__getitem__)

    def map_modules(self, wrap: Callable[[Any], addons.Module]) -> LayerModules:
        """Returns the layers with each module replaced by `fn(module)`."""
        return LayerModules([wrap(module) for module in self.modules], self.type_of_layer)

    def runs_of_one_type(self) -> list[tuple[int, range]]:
        """Splits layers into runs of the same type: (type index, range of layer indices) each."""
        groups = groupby(enumerate(self.type_of_layer), key=itemgetter(1))
        runs = [(index, [layer for layer, _ in members]) for index, members in groups]
        return [(index, range(layers[0], layers[-1] + 1)) for index, layers in runs]

    def first_of_each_type(self, items: Sequence[Item]) -> list[Item]:
        """Picks from a list with one item per layer the item of the first layer of each type."""
        return [items[self.type_of_layer.index(index)] for index in range(len(self.modules))]


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
        if not layer:
            return module
        from modelling.layers.lora import ExpertAdapter, LinearAdapters, VocabularyAdapter

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


def make_trainable_rows(token_ids: Sequence[int]) -> TrainableTokenRows | None:
    """Creates the module of an embedding's or head's trainable rows; None without such tokens."""
    if not token_ids:
        return None
    from modelling.layers.lora import TrainableTokenRows

    return TrainableTokenRows(token_ids)


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
