"""Row formats: conversations, prompt and target columns, or plain text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from config.task import DataFormat
from data.class_labels import ClassLabels
from data.file_readers import DataError, Row
from data.prompt_template import Instruction, Template
from files.file_location import FileLocation
from files.formatting import format_name

PREFERENCE_COLUMNS = {"chosen", "rejected"}
"""Columns of paired preferences."""


class TextTemplate(Protocol):
    """Interface of templates that render a row as text."""

    @property
    def columns(self) -> tuple[str, ...]: ...

    def render(self, row: Mapping[str, Any]) -> str: ...


class PromptTarget(NamedTuple):
    """Templates of prompt and target, and the separator text between them."""

    prompt: TextTemplate
    target: TextTemplate
    separator: str = ""

    @property
    def columns(self) -> set[str]:
        """Columns that a row must have for the templates."""
        return {*self.prompt.columns, *self.target.columns}

    @property
    def used_columns(self) -> set[str]:
        """Columns that the templates use if a row has them."""
        return {*self.columns, *getattr(self.prompt, "optional", ())}


class RowSchema(NamedTuple):
    """Templates and class labels by which the rows of a data source are converted.

    Attributes:
        pair: templates of prompt and target; None: each row's columns determine them.
        labels: class labels of the target column; None: targets are free texts.
    """

    pair: PromptTarget | None = None
    labels: ClassLabels | None = None


COMMON_COLUMNS: Sequence[PromptTarget] = (
    PromptTarget(Template("{prompt}"), Template("{completion}")),
    PromptTarget(Instruction(), Template("{output}"), "\n"),
    PromptTarget(Instruction(), Template("{response}"), "\n"),
    PromptTarget(Template("{question}"), Template("{answer}"), "\n"),
    PromptTarget(Template("{query}"), Template("{response}"), "\n"),
    PromptTarget(Template("{source}"), Template("{target}"), "\n"),
)
"""Columns that need no template, of OpenAI, TRL, Alpaca, Dolly, parallel texts and others. TRL
concatenates prompt and completion; the others get a line feed between them."""

DOCUMENT_TEMPLATE = Template("{text}")
"""Template of plain documents, all of whose tokens are in the loss."""


def detect_row_format(location: FileLocation, row: Row) -> DataFormat:
    """Detect the row format of a data set from one of its rows.

    Raises:
        DataError: preferences, which need an objective of their own.
    """
    from data.conversations import CONVERSATION_COLUMNS, has_conversation
    from data.document_chunks import DocumentChunkRow

    if isinstance(row, DocumentChunkRow) or {*row} == {*DOCUMENT_TEMPLATE.columns}:
        return "language_modeling"
    if row.keys() >= PREFERENCE_COLUMNS and not any(name in row for name in CONVERSATION_COLUMNS):
        raise DataError(
            f"{location}: the columns chosen and rejected are preferences: learn them with "
            "--training.objective dpo, or, to learn the chosen answers alone, give "
            f"{_suggest_chosen_as_target(row)}"
        )
    return "conversational" if has_conversation(row) else "prompt_completion"


def complete_prompt_target(
    location: FileLocation,
    row: Row,
    prompt: TextTemplate | None = None,
    target: TextTemplate | None = None,
) -> PromptTarget:
    """Configured templates of prompt and target, or defaults that fit the columns of a row.

    Raises:
        DataError: none does.
    """
    if prompt is not None and target is not None:
        return PromptTarget(prompt, target)
    for pair in COMMON_COLUMNS:
        if pair.columns <= row.keys():
            is_custom = prompt is not None or target is not None
            separator = "" if is_custom else pair.separator
            return PromptTarget(prompt or pair.prompt, target or pair.target, separator)
    columns = format_name(", ".join(map(str, row)) or "none", 100)
    hint = ", or --data.format language_modeling to learn the column text" if "text" in row else ""
    raise DataError(
        f"{location}: the columns are {columns}, which have no usual meaning: say what the model "
        f"reads and writes, such as {_suggest_templates(row)}{hint}"
    )


def _suggest_templates(row: Row) -> str:
    """Suggest templates with the row's columns, for an error message."""
    columns = [name for name in row if isinstance(name, str) and name and not {*name} & {*"{}'"}]
    names = [name for name in columns if isinstance(row[name], str)] or columns
    if len(names) < 2:
        return "--data.prompt 'summarize: {text}' --data.target '{summary}'"
    prompt_column, target_column = (format_name(name, 30) for name in (names[0], names[-1]))
    return f"--data.prompt '{{{prompt_column}}}' --data.target '{{{target_column}}}'"


def _suggest_chosen_as_target(row: Row) -> str:
    """Suggest flags that train on the chosen answer, for an error message."""
    if isinstance(row["chosen"], list):
        return "--data.messages chosen"
    return f"--data.prompt '{{{'prompt' if 'prompt' in row else next(iter(row))}}}' " \
        "--data.target '{chosen}'"  # fmt: skip
