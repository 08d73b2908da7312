"""New rows of the embedding matrix, for tokens that the pretrained model does not have."""

from __future__ import annotations

from typing import Any

from config.config_sources import LayeredConfig
from config.errors import ConfigError
from config.row_ranges import format_row_ranges
from config.run import RANDOM
from config.sections import RunConfig
from config.values import split_names
from files.formatting import format_names, format_path
from terminal.screen import say

ADDED = "model.add_tokens"


def choose_new_rows(settings: LayeredConfig, model_rows: int) -> dict[str, Any]:
    """Return the configuration fields, by dotted name, that add embedding rows; print the rows.

    New are the tokens of `model.add_tokens`, those of another tokenizer, and further rows of the
    configured vocabulary size.

    Args:
        model_rows: rows of the loaded embedding.

    Returns:
        The fields; empty without new rows.

    Raises:
        UserError: the tokenizer is not available.
    """
    config = settings.config
    rows_field = config.model.field_path("vocab_size")
    is_configured = settings.is_set_by_flag(rows_field) or config.adapter.load is not None
    configured = config.model.vocab_size if is_configured else model_rows
    tokens = _new_tokens(config, model_rows)
    rows = max([model_rows, configured, *(number + 1 for number in tokens)])
    if rows > model_rows:
        parts = config.execution.tensor_parallel
        rows = -(-rows // parts) * parts
    existing = [
        name for name in split_names(config.model.add_tokens) if name not in tokens.values()
    ]
    if existing:
        say(f"{ADDED}: the tokenizer has {format_names(existing)} already")
    new = sorted({*tokens, *range(model_rows, rows)})
    if not new:
        return {}
    row_numbers = format_row_ranges(new)
    grows = f", which grows from {model_rows} to {rows} rows" if rows > model_rows else ""
    names = f" for {format_names(tokens.values())}" if tokens else ""
    noun, verb = ("rows", "begin") if len(new) > 1 else ("row", "begins")
    say(f"{noun} {row_numbers} of the embedding{grows}, {verb} with the mean of the others{names}")
    return {rows_field: rows, config.model.field_path("new_rows"): row_numbers}


def loads_hf_model(settings: LayeredConfig) -> bool:
    """Return True if `checkpoint.load` is a Hugging Face model, to which tokens can be added.

    Raises:
        ConfigError: a flag adds tokens to a run.
    """
    from checkpoints.verified_loading import has_checkpoint

    load = settings.config.checkpoint.load
    if load is None or load == RANDOM:
        return False
    if not has_checkpoint(load):
        return True
    if settings.is_set_by_flag(ADDED):
        raise ConfigError(
            f"{ADDED} is for Hugging Face models, but {format_path(load)} is a run: write it with "
            "run_export.py --save-hf FOLDER, and give --model FOLDER"
        )
    return False


def _new_tokens(config: RunConfig, model_rows: int) -> dict[int, str]:
    """Return the tokens by id whose embedding row is missing or unused in the model."""
    from data.tokenizer import add_tokens
    from huggingface.hub import load_tokenizer

    names, load = split_names(config.model.add_tokens), str(config.checkpoint.load)
    is_user_file = config.uses_model_tokenizer
    if is_user_file and not names:
        return {}
    base = load_tokenizer(config.data.tokenizer or load)
    existing = (
        set(base.get_vocab().values()) if is_user_file else _model_token_ids(load, model_rows)
    )
    add_tokens(base, names)
    vocabulary = base.get_vocab()
    candidates = [*names, *([] if is_user_file else vocabulary)]
    return {n: t for t in candidates if (n := vocabulary[t]) not in existing or n >= model_rows}


def _model_token_ids(model: str, rows: int) -> set[int]:
    """Return the ids in a model's published tokenizer; the ids of all rows if it has none."""
    from huggingface.hub import DataUnavailable, load_tokenizer

    try:
        return set(load_tokenizer(model).get_vocab().values())
    except DataUnavailable:
        return set(range(rows))
