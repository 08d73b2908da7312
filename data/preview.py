"""Preview of training samples in the terminal: tokens, and whether each is in the loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from data.sample_format import SampleFormat, TokenInLoss
from data.samples import Samples
from data.tokenizer import Tokenizer

TOKEN_SEPARATOR = "·"
"""Character between tokens."""
LOSS_COLORS = "\033[32m", "\033[0m"
SEPARATOR_COLORS = "\033[2m", "\033[0m"
"""Terminal colors: green for loss tokens, faint for separators."""
LOSS_BRACKETS = "⟪", "⟫"
"""Brackets around loss tokens where there are no colors."""


def format_samples(
    samples: Samples,
    indices: Sequence[int],
    sample_format: SampleFormat,
    tokenizer: Tokenizer,
    colored: bool,
) -> Iterator[str]:
    """Format the samples at `indices` as lines of text."""
    style = "green" if colored else "in {} {}".format(*LOSS_BRACKETS)
    yield f"the first samples: {TOKEN_SEPARATOR} separates tokens, loss tokens are {style}"
    for number, index in enumerate(indices, 1):
        batch = samples.take(np.asarray([index]))
        texts = sample_format.sequences_with_loss_mask(batch)
        tokens = sum(len(text) for text in texts)
        num_in_loss = sum(in_loss for text in texts for _, in_loss in text)
        noun = "text" if len(texts) == 1 else "texts"
        yield f"sample {number}: {len(texts)} {noun}, {tokens} tokens, {num_in_loss} in the loss"
        for text in texts:
            yield format_sequence(text, tokenizer, colored)


def format_sequence(
    tokens_in_loss: Sequence[TokenInLoss], tokenizer: Tokenizer, colored: bool
) -> str:
    """Format a token sequence as indented lines; a line ends after a newline token."""
    runs = list[tuple[bool, list[str]]]()
    for token, in_loss in tokens_in_loss:
        if not runs or runs[-1][0] != in_loss:
            runs.append((in_loss, []))
        runs[-1][1].append(_format_token(token, tokenizer))
    opening, closing = LOSS_COLORS if colored else LOSS_BRACKETS
    loss_separator = (
        f"{SEPARATOR_COLORS[0]}{TOKEN_SEPARATOR}{SEPARATOR_COLORS[1]}{LOSS_COLORS[0]}"
        if colored
        else TOKEN_SEPARATOR
    )
    separator = (
        f"{SEPARATOR_COLORS[0]}{TOKEN_SEPARATOR}{SEPARATOR_COLORS[1]}"
        if colored
        else TOKEN_SEPARATOR
    )
    segments = [
        f"{opening}{loss_separator.join(pieces)}{closing}" if in_loss else separator.join(pieces)
        for in_loss, pieces in runs
    ]
    lines = separator.join(segments).replace("\\n", "\\n\n").splitlines()
    return "\n".join(
        f"  {line.removeprefix(separator).removeprefix(loss_separator)}" for line in lines
    )


def _format_token(token: int, tokenizer: Tokenizer) -> str:
    """Text of a token on one line; the tokenizer's name for an incomplete character."""
    text = str(tokenizer.hf_tokenizer.decode([token], skip_special_tokens=False))
    if "�" in text or not text:
        text = str(tokenizer.hf_tokenizer.convert_ids_to_tokens(token))
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
