"""Training examples: prompt, target and the spans in the loss; collections of examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from config.errors import UserError
from files.file_location import FileLocation

if TYPE_CHECKING:
    from data.document_chunks import DocumentChunk
    from data.rollout import Rollout

MAX_CHARACTERS = 1_000_000
"""Maximum characters of a text; longer ones would take a tokenizer minutes and gigabytes."""


class TokenizedText(NamedTuple):
    """Token ids, int32 [n], and loss mask, bool [n], of one sequence."""

    ids: np.ndarray
    loss_mask: np.ndarray


class TextSpan(NamedTuple):
    """A piece of an example's text, and whether its tokens are in the loss."""

    text: str
    in_loss: bool


class Languages(NamedTuple):
    """Language codes of an example's prompt and target; None: unknown."""

    source: str | None = None
    target: str | None = None


NO_LANGUAGES = Languages()


class LanguageError(UserError, ValueError):
    """Raised for a language that is missing, or that the tokenizer has no code for.

    Attributes:
        languages: of the text, if known.
    """

    languages: Languages | None = None


def with_languages(
    texts: Sequence[str], languages: Sequence[Languages] = ()
) -> list[tuple[str, Languages]]:
    """Pair texts with language codes; if there are none, the codes are unknown (None)."""
    return list(zip(texts, languages or [NO_LANGUAGES] * len(texts), strict=True))


class Example(NamedTuple):
    """Prompt and target of a training example.

    Attributes:
        prompt: the text before the target.
        target: the text to generate, which metrics compare with.
        rendered_spans: the full text in spans, with special tokens, if a template rendered it; else
            empty.
        doc_chunk: position of the target in its document, which has no prompt.
        desirable: KTO label; None without one.
        languages: of a translation.
        label: names of the text's classes, or its number; None without one.
        rollout: reward of the target, which a policy wrote; None: it has none.
    """

    prompt: str
    target: str
    rendered_spans: tuple[TextSpan, ...] = ()
    doc_chunk: DocumentChunk | None = None
    desirable: bool | None = None
    languages: Languages = NO_LANGUAGES
    label: tuple[str, ...] | float | None = None
    rollout: Rollout | None = None

    @property
    def has_token_ids(self) -> bool:
        """True if the row of a rollout has the tokens of its prompt and completion."""
        return self.rollout is not None and bool(self.rollout.completion_ids)

    def text_spans(self) -> tuple[TextSpan, ...]:
        """Text spans of prompt and target, for a decoder-only model.

        A space goes between prompt and target unless one of them has white space there.
        """
        return self.rendered_spans or (
            TextSpan(self.prompt, False),
            TextSpan(self.target_after_space(), True),
        )

    def target_after_space(self) -> str:
        """The target; begins with a space unless prompt or target has white space between them."""
        has_space = self.target[:1].isspace() or self.prompt[-1:].isspace()
        return self.target if has_space else f" {self.target}"

    def split_prompt_and_answer(self) -> tuple[str, str]:
        """Split the example into prompt and answer, which concatenate to its full text."""
        return self.prompt, self.target if self.rendered_spans else self.target_after_space()

    def with_target(self, target: str, rendered_spans: tuple[TextSpan, ...] = ()) -> Example:
        """Copy of the example with another target, and other rendered spans if given."""
        return self._replace(target=target, rendered_spans=rendered_spans)

    def with_prompt(self, prompt: str) -> Example:
        """Copy of the example with another prompt."""
        return self._replace(prompt=prompt)

    def with_languages(self, languages: Languages) -> Example:
        """Copy of the example with these language codes."""
        return self._replace(languages=languages)

    def without_rendering(self) -> Example:
        """Copy of the example without rendered spans: prompt and target as texts only."""
        return self._replace(rendered_spans=())

    def with_kto_label(self, desirable: bool | None) -> Example:
        """Copy of the example with this KTO label: True for a desirable answer."""
        return self._replace(desirable=desirable)

    def with_rollout(self, rollout: Rollout) -> Example:
        """Copy of the example with this reward of its target."""
        return self._replace(rollout=rollout)

    def with_joined_target(self) -> Example:
        """Copy of the example with prompt and target joined without a separator."""
        return self._replace(
            rendered_spans=(TextSpan(self.prompt, False), TextSpan(self.target, True))
        )


@dataclass(frozen=True)
class Corpus:
    """Examples of a data split, with counts of the rows that were dropped.

    Attributes:
        examples: the examples, in the order of the data.
        unlabeled: number of rows dropped for lack of a label (-1).
        nulls: number of rows dropped for a null in a needed column.
        locations: file locations of the examples' rows; empty if unknown.
        tokens: tokens of the examples in the model's format; None before tokenization.
        characters: all characters of the texts; None if not collected.
        digest: digest of the corpus, if known.
    """

    examples: Sequence[Example]
    unlabeled: int = 0
    nulls: int = 0
    locations: Sequence[FileLocation] = ()
    tokens: Sequence[TokenizedText] | None = None
    characters: str | None = None
    digest: str = ""

    def map_examples(self, function: Callable[[Example], Example]) -> Corpus:
        """Apply a function to every example of the corpus."""
        return replace(self, examples=[function(example) for example in self.examples])

    def first_examples(self, count: int | None) -> Corpus:
        """Corpus with only the first `count` examples; None selects all."""
        tokens = None if self.tokens is None else self.tokens[:count]
        examples, locations = self.examples[:count], self.locations[:count]
        return replace(self, examples=examples, locations=locations, tokens=tokens)

    def row_location(self, index: int) -> FileLocation | None:
        """Location of an example's row in its data file, if known."""
        return self.locations[index] if self.locations else None

    @property
    def dropped_row_messages(self) -> list[str]:
        """Messages about the number of dropped rows, by reason."""
        counts = ((self.unlabeled, "without a label"), (self.nulls, "with null"))
        return [f"{count} {reason} left out" for count, reason in counts if count]
