"""Special tokens of a tokenizer, and a regular expression that finds them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def special_token_texts(hf_tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Texts of a tokenizer's special tokens."""
    added = hf_tokenizer.added_tokens_decoder.values()
    special_texts = {str(token.content) for token in added if token.special}
    return tuple(sorted({*special_texts, *map(str, hf_tokenizer.all_special_tokens)}))


def compile_token_regex(tokens: Iterable[str]) -> re.Pattern[str]:
    """Regular expression that matches any of the tokens, longest first."""
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
