"""Generated samples for benchmarks: random tokens, lengths and answers, in real samples' form."""

from __future__ import annotations

import numpy as np

from data.pairs import IGNORE_INDEX, EncodedExamples

PAD, EOS, FIRST_WORD = 0, 1, 3

SPREAD = 0.45
"""Standard deviation of the logarithm of a prompt's tokens, where they have a mean."""


def generated_examples(
    count: int,
    vocab_size: int,
    sequence_length: int,
    decoder_sequence_length: int,
    seed: int,
    mean_tokens: float | None = None,
) -> EncodedExamples:
    """Random samples.

    Args:
        vocab_size: ids are below it.
        sequence_length: prompts have at most so many tokens, `</s>` included.
        mean_tokens: of a prompt, lengths being log-normal; None: from half to all of
            `sequence_length`, all equally often.
        decoder_sequence_length: targets have from two tokens (one if there is no room) up to it.
    """
    rng = np.random.default_rng(seed)
    source, longest = sequence_length, decoder_sequence_length
    if mean_tokens is None:
        lengths = rng.integers((source + 1) // 2, source, count, endpoint=True)
    else:
        drawn = rng.lognormal(np.log(mean_tokens) - SPREAD**2 / 2, SPREAD, count)
        lengths = np.clip(drawn.round(), 1, source).astype(np.int64)
    starts = np.cumsum([0, *lengths])
    tokens = rng.integers(FIRST_WORD, vocab_size, starts[-1], np.int32)
    tokens[starts[1:] - 1] = EOS
    targets = rng.integers(FIRST_WORD, vocab_size, (count, longest), np.int32)
    left = rng.integers(min(2, longest), longest, (count, 1), endpoint=True) - np.arange(longest)
    targets = np.select([left > 1, left == 1], [targets, EOS], IGNORE_INDEX).astype(np.int32)
    return EncodedExamples(tokens, starts, targets, source, PAD)
