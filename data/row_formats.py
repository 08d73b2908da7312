"""What the columns of a row say: a conversation, a prompt and a target, or text alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from config.task import DataFormat
from data.class_labels import ClassLabels
from data.conversations import CONVERSATION_COLUMNS, has_conversation
from data.document_chunks import DocumentChunkRow
from data.file_readers import DataError, Row
from data.prompt_template import Instruction, Template
from files.file_location import FileLocation
from files.formatting import format_name

PREFERENCE_COLUMNS = {"chosen", "rejected"}
"""Columns of two answers to a prompt, one better than the other."""


class TextTemplate(Protocol):
    """How a row becomes text."""

    @property
    def columns(self) -> tuple[str, ...]: ...

    def render(self, row: Mapping[str, Any]) -> str: ...


class PromptTarget(NamedTuple):
    """What a model reads and what it writes, and what goes between them in one stream."""

    prompt: TextTemplate
    target: TextTemplate
    separator: str = ""

    @property
    def columns(self) -> set[str]:
        """Those that a row must have."""
        return {*self.prompt.columns, *self.target.columns}

    @property
    def used_columns(self) -> set[str]:
        """Those that are read, if a row has them."""
        return {*self.columns, *getattr(self.prompt, "optional", ())}


class RowSchema(NamedTuple):
    """How the rows of a source are read.

    Attributes:
        pair: see `Task.reading`.
        labels: what its labels mean; None: targets are free texts.
    """

    pair: PromptTarget | None = None
    labels: ClassLabels | None = None


COMMON_COLUMNS: Sequence[PromptTarget] = (
    PromptTarget(Template("{prompt}"), Template("{completion}")),
    PromptTarget(Instruction(), Template("{output}"), "\n"),
    PromptTarget(Instruction(), Template("{response}"), "\n"),
    PromptTarget(Template("{question}"), Template("{answer}"), "\n"),
    PromptTarget(Template("{query}"), Template("{response}"), "\n"),
)
"""Columns that need no template: those of OpenAI's and TRL's files, of Alpaca's, of Dolly's, and
further usual ones. TRL joins a prompt and its completion as they are; the others are no
beginnings and ends of a text, and a line feed goes between them."""

DOCUMENT_TEMPLATE = Template("{text}")
"""Documents, which are learned whole."""


def detect_format(place: FileLocation, row: Row) -> DataFormat:
    """What a row holds, where nobody says it.

    Raises:
        DataError: preferences, which need an objective of their own.
    """
    if isinstance(row, DocumentChunkRow) or {*row} == {*DOCUMENT_TEMPLATE.columns}:
        return "language_modeling"
    if row.keys() >= PREFERENCE_COLUMNS and not any(name in row for name in CONVERSATION_COLUMNS):
        raise DataError(
            f"{place}: the columns chosen and rejected are preferences: learn them with "
            "--training.objective dpo, or, to learn the chosen answers alone, give "
            f"{_suggest_chosen(row)}"
        )
    return "conversational" if has_conversation(row) else "prompt_completion"


def find_prompt_target(
    place: FileLocation,
    row: Row,
    prompt: TextTemplate | None = None,
    target: TextTemplate | None = None,
) -> PromptTarget:
    """The forms that are given, else those that fit the row's columns.

    Raises:
        DataError: none does.
    """
    if prompt is not None and target is not None:
        return PromptTarget(prompt, target)
    for pair in COMMON_COLUMNS:
        if pair.columns <= row.keys():
            own = prompt is not None or target is not None
            between = "" if own else pair.separator
            return PromptTarget(prompt or pair.prompt, target or pair.target, between)
    columns = format_name(", ".join(map(str, row)) or "none", 100)
    plain = ", or --data.format language_modeling to learn the column text" if "text" in row else ""
    raise DataError(
        f"{place}: the columns are {columns}, which have no usual meaning: say what the model "
        f"reads and writes, such as {_suggest_templates(row)}{plain}"
    )


def _suggest_templates(row: Row) -> str:
    """Templates with the row's own columns, for advice."""
    plain = [name for name in row if isinstance(name, str) and name and not {*name} & {*"{}'"}]
    names = [name for name in plain if isinstance(row[name], str)] or plain
    if len(names) < 2:
        return "--data.prompt 'summarize: {text}' --data.target '{summary}'"
    read, written = (format_name(name, 30) for name in (names[0], names[-1]))
    return f"--data.prompt '{{{read}}}' --data.target '{{{written}}}'"


def _suggest_chosen(row: Row) -> str:
    """Flags that train the better answer, for advice."""
    if isinstance(row["chosen"], list):
        return "--data.messages chosen"
    return f"--data.prompt '{{{'prompt' if 'prompt' in row else next(iter(row))}}}' " \
        "--data.target '{chosen}'"  # fmt: skip
