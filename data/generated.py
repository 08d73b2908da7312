"""Generated samples for benchmarks: random tokens, lengths and answers, in real samples' form."""

from __future__ import annotations

import numpy as np

from data.encoding import IGNORE_INDEX, EncodedExamples

PAD, EOS, FIRST_WORD = 0, 1, 3


def generated_examples(
    count: int, vocab_size: int, sequence_length: int, decoder_sequence_length: int, seed: int
) -> EncodedExamples:
    """Random samples.

    Args:
        vocab_size: ids are below it.
        sequence_length: prompts have from half of it up to all of it as tokens, `</s>` included.
        decoder_sequence_length: targets have from two tokens (one if there is no room) up to it.
    """
    rng = np.random.default_rng(seed)
    source, longest = sequence_length, decoder_sequence_length
    starts = np.cumsum([0, *rng.integers((source + 1) // 2, source, count, endpoint=True)])
    tokens = rng.integers(FIRST_WORD, vocab_size, starts[-1], np.int32)
    tokens[starts[1:] - 1] = EOS
    targets = rng.integers(FIRST_WORD, vocab_size, (count, longest), np.int32)
    left = rng.integers(min(2, longest), longest, (count, 1), endpoint=True) - np.arange(longest)
    targets = np.select([left > 1, left == 1], [targets, EOS], IGNORE_INDEX).astype(np.int32)
    return EncodedExamples(tokens, starts, targets, source, PAD, truncated=0)
