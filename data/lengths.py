"""How long the texts of a task are, in tokens: what sequence lengths follow from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from data.pipeline import Pipeline
from data.task import Split
from data.texts import Example

MEASURED = 2000
"""Texts that are made tokens to find the longest: those with the most characters. As many, evenly
spread, give the mean."""


@dataclass(frozen=True)
class Lengths:
    """Tokens of the examples of some splits.

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


def lengths_of(data: Pipeline, splits: Sequence[Split]) -> Lengths:
    """Measure the texts of splits.

    Raises:
        UserError: the data or the tokenizer cannot be had, or do not fit the task.
    """
    corpora = [data.corpus(split).examples for split in splits]
    measured = [_measured(data, _longest(examples)) for examples in corpora]
    first = corpora[0]
    spread = first[:: max(1, len(first) // MEASURED)]
    return Lengths(
        len(first),
        max(n for tokens, _ in measured for n in tokens),
        fmean(_measured(data, spread)[0]),
        max(n for _, targets in measured for n in targets),
    )


def _measured(data: Pipeline, examples: Sequence[Example]) -> tuple[list[int], list[int]]:
    return data.shape.lengths(data.given, examples, data.tokenizer)


def _longest(examples: Sequence[Example]) -> list[Example]:
    """Those with the longest targets, and those with the longest texts."""
    whole = sorted(examples, key=lambda e: -sum(len(s.text) for s in e.spans()))[:MEASURED]
    return whole + sorted(examples, key=lambda e: -len(e.target))[:MEASURED]
