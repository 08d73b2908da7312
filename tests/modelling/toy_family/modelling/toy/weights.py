"""The toy's weights."""

from __future__ import annotations

from config.toy import ToyConfig
from modelling.weights import Row, Weight, WeightTable


def weight_table(config: ToyConfig) -> WeightTable:
    """The weights of the configured model."""
    hidden, names = config.model.hidden_size, range(config.model.layers)
    table = (config.model.embedding.vocab_size, hidden)
    layers = {
        "embeddings": (Row("tokens.weight", (Weight("embed", table, 0.2),), axis=0),),
        **{f"layer.{i}": (Row("weight", (Weight(f"h.{i}", (hidden,) * 2, 0.2),)),) for i in names},
        "head": (
            Row("norm.weight", (Weight("norm", (hidden,)),)),
            Row.linear("lm_head", Weight("lm_head", table, 0.2), cut="out"),
        ),
    }
    phases = {
        "embeddings": ("embeddings",),
        "layer": tuple(f"layer.{i}" for i in names),
        "head": ("head",),
    }
    return WeightTable(layers, phases, config.execution.tensor_parallel)
