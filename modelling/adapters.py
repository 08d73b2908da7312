"""A model's layers with the adapters that its configuration asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from config.sections import RunConfig
from modelling.decoder import Decoder
from modelling.decoder_weights import EMBEDDINGS, HEAD, layer_name
from modelling.layers import Dropout, Embeddings, Groups, Layer, Layers, LMHeadLoss, adapt
from modelling.layers.dropout import NO_DROPOUT
from modelling.weights import GROUP, WeightRow, WeightTable
from modelling.weights.adapters import with_adapters

LayerT = TypeVar("LayerT", bound=Layer)
HeadT = TypeVar("HeadT", bound=LMHeadLoss)


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

    def give(self, module: LayerT, *layers: str) -> LayerT:
        """A layer with those of its rows in the table; a part of a layer with those it has maps
        for.

        Args:
            layers: its name, and those of others that it has maps of.
        """
        rows = tuple(row for layer in layers for row in self._layers.get(layer, ()))
        if rows:
            groups = Groups.current(self._config.execution.tensor_parallel)
            drops = not self._config.model.eval
            dropout = Dropout(self._config.adapter.dropout) if drops else NO_DROPOUT
            adapt(module, rows, groups, dropout)
        return module

    def ends(
        self, embeddings: Callable[[], Embeddings], head: Callable[[], HeadT]
    ) -> tuple[Callable[[], Embeddings], Callable[[], HeadT]]:
        """Functions that make a model's two ends with their adapters: a head that is the embedding
        has those of the embedding.

        Args:
            embeddings, head: make them without.
        """
        return (
            lambda: self.give(embeddings(), EMBEDDINGS),
            lambda: self.give(head(), HEAD, EMBEDDINGS),
        )

    def layers(
        self, names: Sequence[str], order: Sequence[int], make: Callable[[int], Layer]
    ) -> Layers:
        """Layers with their adapters: those that differ in these are of different kinds.

        Args:
            names: of each layer in turn.
            order: which kind each is of without adapters.
            make: a new module of that kind.
        """
        whole = [(name, first_group(name)) for name in names]
        forms = [
            [a.form for n in parts for row in self._layers.get(n, ()) for a in row.adapters]
            for parts in whole
        ]
        kinds = [(kind, tuple(form)) for kind, form in zip(order, forms, strict=True)]
        return Layers.of(kinds, lambda kind: self.give(make(kind[0]), *whole[kinds.index(kind)]))

    def experts(self, make: Callable[[int], Layer]) -> Callable[[int], Layer]:
        """Returns a function from a layer's number to a group of its experts with their adapters.

        Args:
            make: makes one without.
        """
        return lambda number: self.give(make(number), first_group(layer_name(number)))


def adapted_decoder(
    decoder: Decoder, config: RunConfig, table_of: Callable[[Any], WeightTable]
) -> Decoder:
    """A decoder alone that has its adapters."""
    adapters = LayerAdapters(config, table_of)

    def layers(room: int) -> Layers:
        order = decoder.layers(room).order

        def make(kind: int) -> Layer:
            module = decoder.layers(room).kinds[kind]
            assert isinstance(module, Layer)
            return module

        return adapters.layers(list(map(layer_name, range(len(order)))), order, make)

    embeddings, head = adapters.ends(decoder.embeddings, decoder.head)
    experts = None if decoder.experts is None else adapters.experts(decoder.experts)
    return replace(decoder, layers=layers, embeddings=embeddings, head=head, experts=experts)


def first_group(layer: str) -> str:
    """Returns the name of the first group of a layer's experts; all have like adapters."""
    return f"{layer}{GROUP}0"
