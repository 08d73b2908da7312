"""Token lengths of a task's examples, from which sequence lengths are chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

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
    """Token lengths of the examples of some splits.

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
    """Measure the token lengths of splits.

    Raises:
        UserError: the data or the tokenizer cannot be had, or do not fit the task.
    """
    if data.source_pipelines and "train" in splits:
        others = [split for split in splits if split != "train"]
        found = [measure_lengths(part, ["train"]) for part in data.source_pipelines.values()]
        found += [measure_lengths(data, others)] if others else []
        return _merge_stats(found, len(data.source_pipelines))
    measured = [_example_lengths(data, data.tokenized_corpus(split)) for split in splits]
    first = [tokens for tokens, _ in measured[0]]
    if data.task.row_format == "language_modeling":
        whole = sum(first) + len(first)
        return LengthStats(
            len(first),
            min(DOCUMENT_SEQUENCE_LENGTH, whole),
            whole / len(first),
            min(DOCUMENT_OUTPUT_LENGTH, whole),
        )
    every = [lengths for split in measured for lengths in split]
    longest, target = (max(lengths) for lengths in zip(*every, strict=True))
    return LengthStats(len(first), longest, fmean(first), target)


def _example_lengths(data: Pipeline, corpus: Corpus) -> list[tuple[int, int]]:
    """Tokens in a sample, and target tokens, of each example."""
    tokens, preference_type, length = (
        corpus.tokens or (),
        data.task.preference_type,
        data.sample_format.count_example_tokens,
    )
    if preference_type is None:
        return [length(one) for one in tokens]
    # Two texts share a sample; an encoder-decoder reads one prompt for both.
    both = sum if data.sample_format.trains_whole_chats else max
    pairs = PreferencePair.from_examples(corpus.examples, tokens, preference_type == "unpaired")
    found = [[*zip(*map(length, pair.sequences), strict=True)] for pair in pairs]
    return [(both(read), max(written)) for read, written in found]


def _merge_stats(found: Sequence[LengthStats], sources: int) -> LengthStats:
    """Merge statistics; the first `sources` of them are of training data."""
    trained = found[:sources]
    examples = sum(one.examples for one in trained)
    return LengthStats(
        examples,
        max(one.longest for one in found),
        sum(one.examples * one.mean for one in trained) / examples,
        max(one.target for one in found),
    )
