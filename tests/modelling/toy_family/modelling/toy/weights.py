"""The toy's weights."""

from __future__ import annotations

from config.toy import ToyConfig
from modelling.decoder_weights import decoder_table
from modelling.weights import Weight, WeightRow, WeightTable


def weight_table(config: ToyConfig) -> WeightTable:
    """The weights of the configured model."""
    hidden, names = config.model.hidden_size, range(config.model.layers)
    table = (config.model.embedding.vocab_size, hidden)
    words, logits = (Weight(name, table, 0.2) for name in ("embed", "lm_head"))
    layers = [[WeightRow("weight", (Weight(f"h.{i}", (hidden,) * 2, 0.2),))] for i in names]
    norm = WeightRow("norm.weight", (Weight("norm", (hidden,)),))
    head = [norm, WeightRow.linear("lm_head", logits, cut="out")]
    return decoder_table(words, layers, head, config.execution.tensor_parallel)
