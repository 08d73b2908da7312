"""Samples of whole texts to embed: rows of contrastive data, or single texts."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import TYPE_CHECKING

import numpy as np

from config.sections import RunConfig
from data.token_sequences import TokenSequences, pack_rows
from data.tokenizer import Tokenizer
from data.truncation import TokenLimit, TruncationCounts, truncate_right

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def make_text_samples(
    texts: Sequence[np.ndarray], texts_per_row: int, config: RunConfig, tokenizer: Tokenizer
) -> TokenSequences:
    """Pack tokenized texts into samples, each row in one sample.

    Args:
        texts: `texts_per_row` for each row.

    Raises:
        TooLongError: a row has more tokens than a sample, and `data.on_long_target` is "error".
    """
    rows = [texts[i : i + texts_per_row] for i in range(0, len(texts), texts_per_row)]
    rows, truncation = _truncate_rows(rows, config, tokenizer)
    sequences = [text for row in rows for text in row]
    length, places = config.model.sequence_length, config.max_texts_per_sample
    _, slots = pack_rows(sequences, texts_per_row, length, places // texts_per_row)
    return TokenSequences(
        sequences,
        slots,
        length,
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
        config.training.pooling,
        truncation,
    )


def tokenize_texts(
    texts: Sequence[str], config: RunConfig, tokenizer: Tokenizer
) -> list[np.ndarray]:
    """Tokenize texts to embed, int32 [n] each; an empty text has no tokens."""
    encoded = list(tokenizer.encode(texts))
    if config.training.pooling == "eos":
        encoded = [tokenizer.append_eos(ids) for ids in encoded]
    return [ids if text else ids[:0] for ids, text in zip(encoded, texts, strict=True)]


def tokenizer_with_end_token(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Returns a copy of a tokenizer that appends the end token to each text."""
    from tokenizers.processors import TemplateProcessing

    hf_tokenizer = deepcopy(tokenizer.hf_tokenizer)
    before, after = tokenizer.affix_ids
    if tokenizer.eos_token_id in after:
        return hf_tokenizer
    numbers = [*before, tokenizer.eos_token_id]
    *first, end = hf_tokenizer.convert_ids_to_tokens(numbers)
    hf_tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=[*first, "$A", end],
        pair=[*first, "$A", end, "$B:1", f"{end}:1"],
        special_tokens=[*zip([*first, end], numbers, strict=True)],
    )
    return hf_tokenizer


def _truncate_rows(
    rows: Sequence[Sequence[np.ndarray]], config: RunConfig, tokenizer: Tokenizer
) -> tuple[list[Sequence[np.ndarray]], TruncationCounts]:
    """Truncate the longest texts of rows that do not fit into a sample, or drop these rows."""
    length, on_long = config.model.sequence_length, config.data.on_long_target
    sizes = [sum(map(len, row)) for row in rows]
    too_long = [i for i, size in enumerate(sizes) if size > length]
    if too_long and on_long == "error":
        longest = max(too_long, key=sizes.__getitem__)
        subject = f"the texts of a row have {sizes[longest]} tokens together"
        limit = TokenLimit(length, "sequence_length")
        raise limit.error(longest * len(rows[0]), subject, sizes[longest])
    if on_long == "skip":
        dropped = {*too_long}
        kept = [row for i, row in enumerate(rows) if i not in dropped]
        return kept, TruncationCounts(dropped=len(too_long))
    num_end = max(len(tokenizer.affix_ids[1]), int(config.training.pooling == "eos"))
    fitting = list(rows)
    for i in too_long:
        fitting[i] = _truncate_longest(rows[i], length, num_end)
    return fitting, TruncationCounts(prompts=len(too_long))


def _truncate_longest(texts: Sequence[np.ndarray], length: int, num_end: int) -> list[np.ndarray]:
    """Truncate the longest texts to one size, so that all fit into `length` tokens together.

    Args:
        num_end: special tokens at the end of a text, which stay.
    """
    room, limit = length, 0
    for number, size in enumerate(sorted(map(len, texts))):
        limit = room // (len(texts) - number)
        if size > limit:
            break
        room -= size
    return [text if len(text) <= limit else truncate_right(text, limit, num_end) for text in texts]
