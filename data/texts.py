"""Texts: what a model reads, what it should write, and which parts are learned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

MAX_CHARACTERS = 1_000_000
"""Of a text, long before it is cut to the tokens that a model reads: more would keep a tokenizer
busy for minutes and gigabytes."""


class TextSpan(NamedTuple):
    """Consecutive text, and whether a model learns to write it."""

    text: str
    learned: bool


class Example(NamedTuple):
    """What the model reads, and what it should write.

    Attributes:
        prompt: the text before the target.
        target: the text to write, which metrics compare with.
        whole: the whole text in spans, where it is written as it is to be read: nothing goes
            between its parts, and special tokens are in it. Empty: it is prompt and target.
    """

    prompt: str
    target: str
    whole: tuple[TextSpan, ...] = ()

    def spans(self) -> tuple[TextSpan, ...]:
        """The whole text, for a model that reads and writes one stream.

        A space goes between prompt and target unless one of them has white space there.
        """
        return self.whole or (TextSpan(self.prompt, False), TextSpan(self.answer(), True))

    def answer(self) -> str:
        """The target in the form that continues the prompt."""
        apart = self.target[:1].isspace() or self.prompt[-1:].isspace()
        return self.target if apart else f" {self.target}"


@dataclass(frozen=True)
class Corpus:
    """Examples, and how many others were left out.

    Attributes:
        unlabelled: because they have no label (-1).
        nulls: because a column that is needed holds null.
    """

    examples: list[Example]
    unlabelled: int = 0
    nulls: int = 0

    @property
    def notes(self) -> list[str]:
        """What was left out, for people."""
        counts = ((self.unlabelled, "without a label"), (self.nulls, "with null"))
        return [f"{count} {why} left out" for count, why in counts if count]
