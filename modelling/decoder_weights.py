"""The weight table of a decoder alone: embeddings, layers and a head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from modelling.weights import Weight, WeightRow, WeightTable

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
    **names: Any,
) -> WeightTable:
    """The table for the phases of `modelling.phases.decoder_only_layout`.

    Args:
        words: the embedding.
        layers: rows of each layer.
        head: its rows.
        names: further fields of the table, on names in files.
    """
    rows = {
        EMBEDDINGS: (WeightRow("tokens.weight", (words,), axis=0),),
        **{layer_name(i): tuple(layer) for i, layer in enumerate(layers)},
        HEAD: tuple(head),
    }
    phases = {
        "embeddings": (EMBEDDINGS,),
        "layer": tuple(map(layer_name, range(len(layers)))),
        "head": (HEAD,),
    }
    return WeightTable(rows, phases, tensor_parallel, **names)
