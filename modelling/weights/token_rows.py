"""The rows of tokens that are trained beside a frozen embedding, under PEFT's names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from config.errors import ConfigError
from config.sections import RunConfig
from modelling.weights.row import Weight, WeightRow, is_of_vocabulary
from modelling.weights.table import TokenRowsOf, WeightTable
from modelling.weights.vocabulary import embedding_names

DELTA = "token_adapter.trainable_tokens_delta"
"""The end of a tensor's name, after its module's, as PEFT has it."""


def with_token_rows(table: WeightTable, config: RunConfig) -> WeightTable:
    """The table with rows for `adapter.trainable_tokens`: of the embedding, and of a head that is
    not tied to it.

    Raises:
        ConfigError: the weight is trained in full as well, or has an adapter; or a weight with an
            adapter has new rows, whatever their training.
    """
    tokens = config.trained_tokens
    _check_new_rows(table, config)
    if not tokens and config.adapter.trainable_tokens is not None:
        raise ConfigError(
            "adapter.trainable_tokens is new, but no rows are: give --model.add_tokens, or numbers"
        )
    if not tokens:
        return table
    has_own_head = any(row.path == "lm_head.weight" for row in table.rows)
    if has_own_head and len(embedding_names(table)) > 1:
        raise ConfigError(
            "adapter.trainable_tokens is for decoders, and for a T5 whose head is its embedding: "
            "PEFT would tie this head to it; give --adapter.modules_to_save shared lm_head"
        )
    paths = {"tokens.weight", *(["lm_head.weight"] if config.adapter.trainable_tokens_head else [])}
    layers, own = dict(table.layers), dict(table.token_rows)
    for layer, rows in table.layers.items():
        for row in rows:
            if row.path not in paths:
                continue
            (weight,) = row.weights
            if row.trained or row.adapters:
                other = "all of which adapter.modules_to_save trains"
                other = "which has an adapter" if row.adapters else other
                raise ConfigError(
                    f"adapter.trainable_tokens trains some rows of {weight.name}, {other}: leave "
                    "one of the two out"
                )
            name = f"{weight.name.removesuffix('.weight')}.{DELTA}"
            new = Weight(name, (len(tokens), weight.shape[1]))
            path = row.path.replace(".weight", ".rows.delta")
            layers[layer] = (*layers[layer], WeightRow(path, (new,), of_adapter=True))
            own[weight.name] = TokenRowsOf(name, tokens)
    return replace(table, layers=layers, token_rows=own)


def _check_new_rows(table: WeightTable, config: RunConfig) -> None:
    """Raise ConfigError for an adapter of a weight with new rows: PEFT's base has no such rows."""
    if config.model.new_rows is None:
        return
    for module in (a.module for row in table.rows if is_of_vocabulary(row) for a in row.adapters):
        raise ConfigError(
            f"adapter.targets means {module}, which has rows for new tokens: give "
            f"--adapter.modules_to_save {module} in its place"
        )


def trains_rows(table: WeightTable, name: str, rows: Iterable[int]) -> bool:
    """Decide whether all of some rows of a weight are trained apart from it."""
    return name in table.token_rows and {*rows} <= {*table.token_rows[name].tokens}
