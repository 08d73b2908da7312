"""A model's layers with the adapters that its configuration asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from config.sections import RunConfig
from modelling.decoder import Decoder
from modelling.decoder_weights import layer_name
from modelling.layers import Dropout, Groups, Layer, Layers, adapt
from modelling.layers.dropout import NO_DROPOUT
from modelling.weights import WeightRow, WeightTable
from modelling.weights.adapters import with_adapters


class LayerAdapters:
    """The adapters of a model's layers.

    Args:
        table_of: makes the family's table.
    """

    def __init__(self, config: RunConfig, table_of: Callable[[Any], WeightTable]) -> None:
        self._config = config
        self._layers: dict[str, tuple[WeightRow, ...]] = {}
        if config.adapter.rank:
            table = with_adapters(table_of(config), config.adapter, config.adapter_targets)
            self._layers = dict(table.layers)

    def give(self, module: Layer, layer: str) -> Layer:
        """A layer with those of its rows in the table; a part of a layer with those it has maps
        for."""
        if layer in self._layers:
            groups = Groups.current(self._config.execution.tensor_parallel)
            drops = not self._config.model.eval
            dropout = Dropout(self._config.adapter.dropout) if drops else NO_DROPOUT
            adapt(module, self._layers[layer], groups, dropout)
        return module

    def layers(
        self, names: Sequence[str], order: Sequence[int], make: Callable[[int], Layer]
    ) -> Layers:
        """Layers with their adapters: those that differ in these are of different kinds.

        Args:
            names: of each layer in turn.
            order: which kind each is of without adapters.
            make: a new module of that kind.
        """
        forms = [[a.form for row in self._layers.get(n, ()) for a in row.adapters] for n in names]
        kinds = [(kind, tuple(form)) for kind, form in zip(order, forms, strict=True)]
        return Layers.of(kinds, lambda kind: self.give(make(kind[0]), names[kinds.index(kind)]))


def adapted_decoder(
    decoder: Decoder, config: RunConfig, table_of: Callable[[Any], WeightTable]
) -> Decoder:
    """A decoder alone whose layers have their adapters."""
    adapters = LayerAdapters(config, table_of)

    def layers(room: int) -> Layers:
        order = decoder.layers(room).order

        def make(kind: int) -> Layer:
            module = decoder.layers(room).kinds[kind]
            assert isinstance(module, Layer)
            return module

        return adapters.layers(list(map(layer_name, range(len(order)))), order, make)

    return replace(decoder, layers=layers)
