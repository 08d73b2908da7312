"""Checks of tokenizers for a missing vocabulary and for special tokens in an old format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from config.errors import UserError
from files.formatting import format_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MIN_TOKENS = 2
"""Minimum number of tokens that are not special."""

SPECIAL_TOKENS_FIELD = "additional_special_tokens"


class NoVocabularyError(UserError, ValueError):
    """Raised for a tokenizer whose vocabulary file is missing."""


def check_vocabulary(tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    """Raise NoVocabularyError for a tokenizer that has only special tokens.

    transformers makes one where the file of the vocabulary is missing; all text is unknown to it.
    """
    special_tokens = {token.content for token in tokenizer.added_tokens_decoder.values()}
    ordinary_tokens = (
        tokenizer.get_vocab().keys() - special_tokens - _built_in_tokens(type(tokenizer))
    )
    files = dict.fromkeys(["tokenizer.json", *tokenizer.vocab_files_names.values()])
    if (
        len(ordinary_tokens) >= MIN_TOKENS or not tokenizer.vocab_files_names
    ):  # such as ByT5's, of all bytes
        return
    raise NoVocabularyError(
        f"the tokenizer in {format_path(name)} has no vocabulary, so all text would be unknown to "
        f"it: copy the model's {' or '.join(files)} there, or give another with --tokenizer"
    )


def _built_in_tokens(tokenizer_class: type[PreTrainedTokenizerFast]) -> set[str]:
    """Tokens that a tokenizer class has without any files."""
    try:
        return set(tokenizer_class().get_vocab())
    except Exception:  # one that needs files raises errors of many kinds
        return set()


def special_token_arguments(name: str, **options: Any) -> dict[str, Any]:
    """Keyword arguments that restore special tokens stored as JSON objects.

    transformers 5 does not read these.

    Args:
        name: a folder, or a model on the hub.
        options: arguments of transformers on where to look.
    """
    from tokenizers import AddedToken
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    tokens = get_tokenizer_config(name, **options).get(SPECIAL_TOKENS_FIELD)
    if not isinstance(tokens, list) or not any(isinstance(token, dict) for token in tokens):
        return {}
    flags = ("lstrip", "rstrip", "single_word", "normalized")
    return {
        SPECIAL_TOKENS_FIELD: [
            AddedToken(token["content"], **{n: token[n] for n in flags if n in token})
            if isinstance(token, dict)
            else token
            for token in tokens
        ]
    }
