"""A model's layers with the adapters that its configuration asks for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

from config.sections import RunConfig
from modelling.decoder import Decoder
from modelling.decoder_weights import layer_name
from modelling.layers import Dropout, Groups, Layer, Layers, adapt
from modelling.layers.dropout import NO_DROPOUT
from modelling.weights import WeightTable
from modelling.weights.adapters import with_adapters


def give_adapters(
    module: Layer, config: RunConfig, table_of: Callable[[Any], WeightTable], layer: str
) -> None:
    """Give a layer the adapters of the rows of its table; a part of a layer those it has maps for.

    Args:
        table_of: makes the family's table.
        layer: a name there, of any layer of the stack.
    """
    if config.adapter.rank:
        table = _table(config, table_of)
        groups = Groups.current(config.execution.tensor_parallel)
        dropout = NO_DROPOUT if config.model.eval else Dropout(config.adapter.dropout)
        adapt(module, table.layers[layer], groups, dropout)


@lru_cache(maxsize=2)
def _table(config: RunConfig, table_of: Callable[[Any], WeightTable]) -> WeightTable:
    """The table with adapters, which all blocks of a program ask for."""
    return with_adapters(table_of(config), config.adapter, config.adapter_targets)


def adapted_decoder(
    decoder: Decoder, config: RunConfig, table_of: Callable[[Any], WeightTable]
) -> Decoder:
    """A decoder alone whose layers have their adapters."""

    def layers(room: int) -> Layers:
        made = decoder.layers(room)
        for kind in made.kinds:
            assert isinstance(kind, Layer)
            give_adapters(kind, config, table_of, layer_name(0))
        return made

    return replace(decoder, layers=layers)
