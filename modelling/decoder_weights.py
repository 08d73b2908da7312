"""The weight table of a decoder alone: embeddings, layers and a head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from modelling.weights import GROUP, Weight, WeightRow, WeightTable

EMBEDDINGS = "embeddings"
HEAD = "head"


def layer_name(index: int) -> str:
    """Name of a layer."""
    return f"layer.{index}"


def decoder_table(
    words: Weight,
    layers: Sequence[Sequence[WeightRow]],
    head: Sequence[WeightRow],
    tensor_parallel: int,
    groups: Sequence[Sequence[Sequence[WeightRow]]] = (),
    **names: Any,
) -> WeightTable:
    """The table for the phases of `modelling.phases.decoder_only_layout`.

    Args:
        words: the embedding.
        layers: rows of each layer.
        head: its rows.
        groups: rows of each layer's groups of experts, which are phases of their own.
        names: further fields of the table, on names in files.
    """
    of_layers: dict[str, tuple[WeightRow, ...]] = {}
    parts: list[str] = []
    for i, layer in enumerate(layers):
        of_layer = groups[i] if groups else ()
        own = [f"{layer_name(i)}{GROUP}{g}" for g in range(len(of_layer))]
        of_layers |= dict(zip([layer_name(i), *own], map(tuple, [layer, *of_layer]), strict=True))
        parts += own
    rows = {
        EMBEDDINGS: (WeightRow("tokens.weight", (words,), axis=0),),
        **of_layers,
        HEAD: tuple(head),
    }
    phases = {
        "embeddings": (EMBEDDINGS,),
        "layer": tuple(map(layer_name, range(len(layers)))),
        **({"experts": tuple(parts)} if parts else {}),
        "head": (HEAD,),
    }
    return WeightTable(rows, phases, tensor_parallel, **names)
