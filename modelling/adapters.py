"""A model's layers with the adapters that its configuration asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from config.sections import RunConfig
from modelling.decoder import EMBEDDINGS, HEAD, Decoder, layer_name
from modelling.layers import (
    Dropout,
    Embeddings,
    ExpertGroup,
    Layers,
    LMHeadLoss,
    Module,
    adapt,
)
from modelling.layers.dropout import NO_DROPOUT
from modelling.weights import GROUP, WeightRow, WeightTable
from modelling.weights.adapters import with_adapters

Item = TypeVar("Item")
ModuleT = TypeVar("ModuleT", bound=Module)


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

    def give(self, module: ModuleT, *layers: str) -> ModuleT:
        """A layer with those of its rows in the table; a part of a layer with those it has maps
        for.

        Args:
            layers: its name, and those of others that it has maps of.
        """
        rows = tuple(row for layer in layers for row in self._layers.get(layer, ()))
        if rows:
            drops = not self._config.model.eval
            dropout = Dropout(self._config.adapter.dropout) if drops else NO_DROPOUT
            adapt(module, rows, dropout)
        return module

    def embeddings(self, module: Embeddings) -> Embeddings:
        """A model's embeddings with their adapters."""
        return self.give(module, EMBEDDINGS)

    def head(self, module: LMHeadLoss) -> LMHeadLoss:
        """A model's head with its adapters: one that is the embedding has the embedding's."""
        return self.give(module, HEAD, EMBEDDINGS)

    def layers(
        self, names: Sequence[str], types: Sequence[Item], make: Callable[[Item], Module]
    ) -> Layers:
        """Layers with their adapters: those that differ in these are of different kinds.

        Args:
            names: of each layer in turn.
            types: of each layer in turn, without adapters.
            make: a new module of a type.
        """
        whole = [(name, first_group(name)) for name in names]
        forms = [
            [a.form for n in parts for row in self._layers.get(n, ()) for a in row.adapters]
            for parts in whole
        ]
        kinds = [(kind, tuple(form)) for kind, form in zip(types, forms, strict=True)]
        return Layers.of(kinds, lambda kind: self.give(make(kind[0]), *whole[kinds.index(kind)]))


class AdaptedDecoder:
    """The modules of a decoder with its adapters, made in the current Ir.

    Attributes:
        layers: its blocks, a kind for each type and form of adapters.
        usage: see `Decoder`.
    """

    def __init__(self, decoder: Decoder, adapters: LayerAdapters) -> None:
        self._decoder, self._adapters = decoder, adapters
        names = [layer_name(i) for i in range(len(decoder.layer_types))]
        self.layers = adapters.layers(names, decoder.layer_types, decoder.block)
        self.usage = decoder.usage

    def experts(self, layer: int) -> ExpertGroup | None:
        """A group of the experts of a layer; None: they are no phases of their own."""
        make = self._decoder.experts
        return None if make is None else self._adapters.give(make(), first_group(layer_name(layer)))

    def embeddings(self) -> Embeddings:
        """The beginning of the model."""
        return self._adapters.embeddings(self._decoder.embeddings())

    def head(self) -> LMHeadLoss:
        """The end of the model."""
        return self._adapters.head(self._decoder.head())


def first_group(layer: str) -> str:
    """Returns the name of the first group of a layer's experts; all have like adapters."""
    return f"{layer}{GROUP}0"
