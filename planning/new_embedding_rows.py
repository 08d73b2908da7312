"""Rows of the embedding for tokens that the model which is loaded does not have."""

from __future__ import annotations

import os
from typing import Any

from checkpoints.verified_loading import has_checkpoint
from config.errors import ConfigError
from config.layers import Settings
from config.rows import rows_text
from config.sections import RunConfig
from config.values import listed
from data.tokenizer import add_tokens
from files.formatting import format_names, format_path
from huggingface.hub import DataUnavailable, load_tokenizer
from huggingface.pretrained import RANDOM
from terminal.screen import say

ADDED = "model.add_tokens"


def new_rows(settings: Settings, model_rows: int) -> dict[str, Any]:
    """The embedding's fields for new tokens, by dotted names; empty: there are none.

    They are those of `model.add_tokens`, and those of a tokenizer that is not the model's own.
    Other rows that the vocabulary's size asks for are new too. Says which are.

    Args:
        model_rows: of the embedding that is loaded.

    Raises:
        UserError: the tokenizer cannot be had.
    """
    config = settings.config
    rows_field = config.model.path("vocab_size")
    is_asked = settings.by_flag(rows_field) or config.adapter.load is not None
    asked = config.model.vocab_size if is_asked else model_rows
    tokens = _new_tokens(config, model_rows)
    rows = max([model_rows, asked, *(number + 1 for number in tokens)])
    if rows > model_rows:
        parts = config.execution.tensor_parallel
        rows = -(-rows // parts) * parts
    known = [name for name in listed(config.model.add_tokens) if name not in tokens.values()]
    if known:
        say(f"{ADDED}: the tokenizer has {format_names(known)} already")
    new = sorted({*tokens, *range(model_rows, rows)})
    if not new:
        return {}
    named = rows_text(new)
    grows = f", which grows from {model_rows} to {rows} rows" if rows > model_rows else ""
    names = f" for {format_names(tokens.values())}" if tokens else ""
    many, begin = ("rows", "begin") if len(new) > 1 else ("row", "begins")
    say(f"{many} {named} of the embedding{grows}, {begin} with the mean of the others{names}")
    return {rows_field: rows, config.model.path("new_rows"): named}


def asks_for_rows(settings: Settings) -> bool:
    """Decide whether settings may ask for other rows than the model has."""
    config = settings.config
    asked = settings.by_flag(config.model.path("vocab_size"))
    return asked or bool(config.model.add_tokens) or not _has_own(config)


def is_model(settings: Settings) -> bool:
    """Decide whether new tokens can be added to what is loaded: a Hugging Face model.

    Raises:
        ConfigError: a flag adds some to a run.
    """
    load = settings.config.checkpoint.load
    if load is None or load == RANDOM:
        return False
    if not has_checkpoint(load):
        return True
    if settings.by_flag(ADDED):
        raise ConfigError(
            f"{ADDED} is for Hugging Face models, but {format_path(load)} is a run: write it with "
            "run_export.py --save-hf FOLDER, and give --model FOLDER"
        )
    return False


def _new_tokens(config: RunConfig, model_rows: int) -> dict[int, str]:
    """Tokens by number that have no row yet, or one that nothing uses."""
    names, load = listed(config.model.add_tokens), str(config.checkpoint.load)
    is_own = _has_own(config)
    if is_own and not names:
        return {}
    base = load_tokenizer(config.data.tokenizer or load)
    known = set(base.get_vocab().values()) if is_own else _numbers(load, model_rows)
    add_tokens(base, names)
    vocabulary = base.get_vocab()
    wanted = [*names, *([] if is_own else vocabulary)]
    return {n: t for t in wanted if (n := vocabulary[t]) not in known or n >= model_rows}


def _has_own(config: RunConfig) -> bool:
    """Decide whether the tokenizer is that of the model."""
    given, load = config.data.tokenizer, str(config.checkpoint.load)
    return given is None or os.path.realpath(given) == os.path.realpath(load)


def _numbers(model: str, rows: int) -> set[int]:
    """Numbers of the tokens that a model knows: of its own tokenizer, else all of its rows."""
    try:
        return set(load_tokenizer(model).get_vocab().values())
    except DataUnavailable:
        return set(range(rows))
