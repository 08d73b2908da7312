"""Statistics of examples' token lengths, from which sequence lengths are chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from config.objectives import WHOLE_TEXTS
from data.examples import Corpus
from data.pipeline import Pipeline
from data.preference_samples import PreferencePair
from data.task import Split

DOCUMENT_SEQUENCE_LENGTH = 1024
"""Default tokens of a sample of documents, as in transformers' run_clm."""

DOCUMENT_OUTPUT_LENGTH = 256
"""Default tokens that a model of documents generates."""


@dataclass(frozen=True)
class LengthStats:
    """Token lengths of the examples of one or more splits.

    Attributes:
        examples: how many there are in the first split.
        longest: most tokens that a sample holds of one.
        mean: tokens of an example of the first split, on average.
        target: most tokens of a target, the end token included.
    """

    examples: int
    longest: int
    mean: float
    target: int


def measure_lengths(data: Pipeline, splits: Sequence[Split]) -> LengthStats:
    """Measure the token lengths of the examples of some splits.

    Raises:
        UserError: the data or the tokenizer cannot be had, or do not fit the task.
    """
    if data.source_pipelines and "train" in splits:
        other_splits = [split for split in splits if split != "train"]
        stats = [measure_lengths(source, ["train"]) for source in data.source_pipelines.values()]
        stats += [measure_lengths(data, other_splits)] if other_splits else []
        return _merge_length_stats(stats, len(data.source_pipelines))
    lengths_by_split = [
        _count_tokens_per_example(data, data.read_tokenized_corpus(split)) for split in splits
    ]
    training_lengths = [tokens for tokens, _ in lengths_by_split[0]]
    if data.task.row_format == "language_modeling":
        total = sum(training_lengths) + len(training_lengths)
        return LengthStats(
            len(training_lengths),
            min(DOCUMENT_SEQUENCE_LENGTH, total),
            total / len(training_lengths),
            min(DOCUMENT_OUTPUT_LENGTH, total),
        )
    all_lengths = [lengths for split in lengths_by_split for lengths in split]
    longest, target = (max(lengths) for lengths in zip(*all_lengths, strict=True))
    return LengthStats(len(training_lengths), longest, fmean(training_lengths), target)


def _count_tokens_per_example(data: Pipeline, corpus: Corpus) -> list[tuple[int, int]]:
    """Count the tokens that each example has in a sample, and those of its target."""
    tokens = corpus.tokens or ()
    row_type = data.task.row_type
    length = data.sample_format.count_example_tokens
    if row_type in WHOLE_TEXTS:  # an answer is as short as can be
        sizes, count = [len(text.ids) for text in tokens], data.task.examples_per_row
        return [(sum(sizes[i : i + count]), 1) for i in range(0, len(sizes), count)]
    if not data.user_config.training.learns_preferences:
        return [length(tokens_of_one) for tokens_of_one in tokens]
    # Two texts share a sample; an encoder-decoder reads one prompt for both.
    combine = sum if data.sample_format.trains_whole_chats else max
    pairs = PreferencePair.from_examples(corpus.examples, tokens, row_type == "unpaired")
    pair_lengths = [[*zip(*map(length, pair.sequences), strict=True)] for pair in pairs]
    return [
        (combine(total_lengths), max(target_lengths))
        for total_lengths, target_lengths in pair_lengths
    ]


def _merge_length_stats(stats: Sequence[LengthStats], num_training_sources: int) -> LengthStats:
    """Merge length statistics of data sources, of which the first ones are training data."""
    training_stats = stats[:num_training_sources]
    examples = sum(source_stats.examples for source_stats in training_stats)
    return LengthStats(
        examples,
        max(source_stats.longest for source_stats in stats),
        sum(source_stats.examples * source_stats.mean for source_stats in training_stats)
        / examples,
        max(source_stats.target for source_stats in stats),
    )
