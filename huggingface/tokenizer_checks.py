"""Checks of tokenizers: text growth, crashes in the library, vocabulary and special tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import regex

from config.errors import UserError
from files.formatting import format_name, format_path
from files.json_files import read_json_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MAX_GROWTH = 1000
"""Factor by which a tokenizer's replacements may lengthen a text."""
TOKENIZER_FILE = "tokenizer.json"
MIN_TOKENS = 2
"""Minimum number of tokens that are not special."""

SPECIAL_TOKENS_FIELD = "additional_special_tokens"


@contextmanager
def wrap_rust_panics() -> Iterator[None]:
    """Convert a Rust panic of the tokenizers library into a UserError."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise UserError(
            f"the tokenizer fails on a text ({format_name(str(error).strip(), 80)}): its "
            f"{TOKENIZER_FILE} is damaged, or made to; give another --tokenizer"
        ) from None


def check_text_growth(file: Path) -> None:
    """Raise UserError if a tokenizer file can lengthen a text beyond `MAX_GROWTH`.

    A missing file passes.
    """
    if not file.is_file():
        return
    tokenizer_json = read_json_object(file).data
    for component in ("normalizer", "decoder"):
        if max_text_growth(tokenizer_json.get(component)) > MAX_GROWTH:
            raise UserError(
                f"{format_path(file)}: the replacements of its {component} lengthen a text more "
                f"than {MAX_GROWTH:,} times: give another --tokenizer"
            )


def max_text_growth(component: Any) -> float:
    """Maximum factor by which a tokenizer's normalizer or decoder can lengthen a text."""
    if not isinstance(component, dict):
        return 1.0
    growth = 1.0
    for name in ("normalizers", "decoders"):
        for child in component.get(name) or () if isinstance(component.get(name), list) else ():
            growth *= max_text_growth(child)
    if component.get("type") != "Replace" or not isinstance(component.get("content"), str):
        return growth
    content, pattern = len(component["content"]), component.get("pattern")
    text = pattern.get("String") if isinstance(pattern, dict) else None
    if isinstance(text, str) and text:
        return growth * max(1.0, content / len(text))
    is_between = text == "" or _matches_empty(pattern)
    return growth * max(1.0, content + is_between)


def _matches_empty(pattern: Any) -> bool:
    """True if a regular expression can match the empty string, also if the check times out."""
    expression = pattern.get("Regex") if isinstance(pattern, dict) else None
    try:
        return regex.match(str(expression), "", timeout=1.0) is not None
    except (regex.error, TimeoutError):  # it may
        return True


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
