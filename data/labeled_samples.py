"""Samples of labeled sequences, for classification and regression, and of compared ones.

Batches have, besides the arrays of `data.token_sequences`, a row for each sequence, float32:
    sequence_labels   [sequences, classes]   1 for its classes, 0 for the others; or its number
    is_labeled        [sequences, 1]         1, or 0 where a sample has fewer sequences
Of compared sequences a row is that of a pair, and its label the margin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from config.task import SegmentsData, Seq2SeqData
from data.packing import EMPTY_SLOT
from data.samples import ExtendedSamples
from data.token_sequences import pack_rows, truncate_sequences
from data.truncation import TokenLimit, TruncationCounts

if TYPE_CHECKING:
    from config.sections import RunConfig
    from data.examples import Example, TokenizedText
    from data.sample_format import SampleFormat
    from data.tokenizer import Tokenizer

LABELS, IS_LABELED = "sequence_labels", "is_labeled"


@dataclass(frozen=True)
class LabeledSamples(ExtendedSamples):
    """Token sequences with their labels.

    Attributes:
        samples: of the sequences' tokens.
        rows: int64 [n, places], the index of the label in each place, or `EMPTY_SLOT`.
        labels: float32 [labels, classes].
    """

    rows: np.ndarray
    labels: np.ndarray

    @property
    def digest(self) -> str:
        return self.hash_with(self.rows, self.labels)

    def take(self, indices: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """Batch of the samples at `indices`, in their order: arrays by name."""
        positions = np.asarray(indices, np.int64)
        rows = self.rows[positions].reshape(-1)
        is_used = (rows != EMPTY_SLOT)[:, None].astype(np.float32)
        labels = self.labels[rows] * is_used
        return self.samples.take(positions) | {LABELS: labels, IS_LABELED: is_used}


def make_labeled_samples(
    sample_format: SampleFormat,
    config: RunConfig,
    examples: Sequence[Example],
    tokenized: Sequence[TokenizedText],
    tokenizer: Tokenizer,
) -> LabeledSamples:
    """Convert tokenized texts with their labels to samples of fixed length.

    Texts that are too long lose their end, conversations their beginning.
    """
    length = config.model.sequence_length
    is_chat = config.data.format == "conversational"
    num_end_tokens = len(tokenizer.affix_ids[1])
    sequences, truncation = truncate_sequences(
        [text.ids for text in tokenized], length, num_end_tokens, keep_end=is_chat
    )
    assert isinstance(config.data, SegmentsData | Seq2SeqData)
    rows, slots = pack_rows(sequences, 1, length, config.data.examples_per_sample)
    samples = sample_format.make_sequence_samples(config, sequences, slots, tokenizer, truncation)
    return LabeledSamples(samples, rows, label_matrix(config, examples))


def make_reward_samples(
    sample_format: SampleFormat,
    config: RunConfig,
    examples: Sequence[Example],
    tokenized: Sequence[TokenizedText],
    tokenizer: Tokenizer,
) -> LabeledSamples:
    """Convert tokenized pairs of texts with their margins to samples of fixed length.

    A pair that does not fit is dropped, as in TRL, and never truncated.

    Raises:
        TooLongError: a pair is too long, and `data.on_long_target` is "error".
    """
    length = config.model.sequence_length
    sequences = [text.ids for text in tokenized]
    sizes = [len(a) + len(b) for a, b in zip(sequences[::2], sequences[1::2], strict=True)]
    fitting = [i for i, size in enumerate(sizes) if size <= length]
    dropped = len(sizes) - len(fitting)
    if dropped and config.data.on_long_target == "error":
        longest = int(np.argmax(sizes))
        subject = f"the two texts have {sizes[longest]} tokens together"
        raise TokenLimit(length, "sequence_length").error(2 * longest, subject, sizes[longest])
    kept = [sequences[2 * i + j] for i in fitting for j in (0, 1)]
    assert isinstance(config.data, SegmentsData | Seq2SeqData)
    rows, slots = pack_rows(kept, 2, length, config.data.examples_per_sample)
    samples = sample_format.make_sequence_samples(
        config, kept, slots, tokenizer, TruncationCounts(dropped=dropped)
    )
    margins = np.asarray([[examples[2 * i].label] for i in fitting], np.float32).reshape(-1, 1)
    return LabeledSamples(samples, rows, margins)


def label_matrix(config: RunConfig, examples: Sequence[Example]) -> np.ndarray:
    """Returns the labels of examples as numbers, float32 [n, classes]; see the module."""
    labels = np.zeros((len(examples), config.num_labels), np.float32)
    if config.training.row_type == "scored":
        labels[:, 0] = [example.label for example in examples]
        return labels
    names = (config.data.class_labels or "").split(",")
    number = {name.strip(): index for index, name in enumerate(names)}
    for row, example in zip(labels, examples, strict=True):
        assert isinstance(example.label, tuple)
        row[[number[name] for name in example.label]] = 1
    return labels
