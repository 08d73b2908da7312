"""Tasks: data sources, prompt and target templates, labels and metrics."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from tqdm import tqdm

from config.errors import UserError
from config.metrics import RETRIEVAL_METRICS
from config.objectives import LABELED, RowType
from config.sections import Data
from config.task import DataFormat, OnNull
from data.class_labels import UNLABELED, ClassLabels, match_column_labels
from data.examples import MAX_CHARACTERS, Corpus, Example
from data.prompt_template import ColumnError, NullError, Template
from data.row_formats import (
    COMMON_COLUMNS,
    DOCUMENT_TEMPLATE,
    PromptTarget,
    RowSchema,
    TextTemplate,
    complete_prompt_target,
    detect_row_format,
)
from data.sources import DataError, FileSource, HubDataset, Row, Source, source_from_name
from data.translation import USUAL_COLUMNS, TranslationLanguages, with_language_columns
from files.file_location import FileLocation
from files.formatting import format_path
from terminal.screen import is_first_process

if TYPE_CHECKING:
    from data.conversations import Conversation
    from data.data_warnings import DataWarnings

Split = Literal["train", "validation"]

SAMPLE_FOLDER = Path(__file__).parent / "sample"
NLI_LABELS = ("entailment", "neutral", "contradiction")
NULL_VALUE = -2
"""Marks an example whose row has a null where a value is needed."""


class ConversationReader(Protocol):
    """Interface of the converter from conversations to examples."""

    def example_or_none(self, location: FileLocation, conversation: Conversation) -> Example | None:
        """Convert a conversation to an example; None, with a warning, if it is dropped."""
        ...

    def text_or_none(self, location: FileLocation, conversation: Conversation) -> str | None:
        """Render a whole conversation; None, with a warning, if it is dropped."""
        ...


@dataclass(frozen=True)
class Task:
    """A training task: its data sources, templates, class labels and metrics.

    Attributes:
        name: for people.
        sources: by split; one may be missing where it is not needed.
        prompt: what the model reads.
        target: what it should write.
        user_labels: configured labels; None: those of the data, see `labels`.
        validation_fraction: the fraction of the training data that is the validation split; None:
            that has data of its own.
        on_null: see `Data.on_null`.
        format, messages, system: as in the configuration.
        row_type: see `Training.row_type`.
        num_negatives: of contrastive rows, see `Training.negatives`.
        fixed_separator: text between prompt and target; None: the columns decide.
        languages: of translations.
    """

    name: str
    sources: Mapping[Split, Source]
    prompt: TextTemplate | None
    target: TextTemplate | None
    user_labels: tuple[str, ...] | None = None
    validation_fraction: float | None = None
    on_null: OnNull = "error"
    format: DataFormat | None = None
    messages: str | None = None
    system: str | None = None
    fixed_separator: str | None = None
    row_type: RowType | None = None
    num_negatives: int = 0
    languages: TranslationLanguages = USUAL_COLUMNS

    @cached_property
    def row_format(self) -> DataFormat:
        """Format of the task's rows, such as conversations: configured, or that of the first row.

        Raises:
            UserError: there is no such row, or it cannot be read.
        """
        if self.format is not None:
            return self.format
        if self.row_type in LABELED:
            is_chat = self._first_row is not None and self._has_conversation(self._first_row[1])
            return "conversational" if is_chat else "prompt_completion"
        if self.row_type is not None:
            if self._first_row is None or self.row_type == "contrastive":
                return "prompt_completion"
            from data.preference_rows import detect_answer_format

            return detect_answer_format(self._first_row[1])
        if self.prompt is not None and self.target is not None:
            return "prompt_completion"
        if self.messages is not None:
            return "conversational"
        return (
            "prompt_completion" if self._first_row is None else detect_row_format(*self._first_row)
        )

    @property
    def examples_per_row(self) -> int:
        """Number of examples that a row becomes; of unpaired answers it depends on the row."""
        return {"paired": 2, "compared": 2, "contrastive": 2 + self.num_negatives}.get(
            self.row_type or "", 1
        )

    @property
    def is_user_data(self) -> bool:
        """True if the data are the user's, not those of a built-in task."""
        return self.name not in TASKS

    @property
    def separator(self) -> str:
        """Text between prompt and target for a decoder-only model."""
        if (
            self.fixed_separator is not None
            or self.row_type
            or self.row_format != "prompt_completion"
        ):
            return self.fixed_separator or ""
        return (
            ""
            if self._first_row is None
            else self._complete_prompt_target(*self._first_row).separator
        )

    @cached_property
    def _first_row(self) -> tuple[FileLocation, Row] | None:
        first_rows = (_read_first_row(source) for source in self.sources.values())
        return next((first for first in first_rows if first is not None), None)

    @cached_property
    def labels(self) -> tuple[str, ...] | None:
        """Class labels: configured, or from the target's ClassLabel column; None for free text.

        Raises:
            UserError: only the data can tell, and cannot be read.
        """
        if self.row_type == "scored":
            return None
        if self.user_labels is not None:
            return self.user_labels
        candidates = (self._read_class_names(source) for source in self.sources.values())
        names = next((names for names in candidates if names is not None), None)
        return self._collect_classes() if names is None and self.row_type == "labeled" else names

    @cached_property
    def labels_are_lists(self) -> bool:
        """True if the labels of the rows are lists of classes."""
        from data.labeled_rows import find_label_column, is_list_column

        if self.row_type != "labeled" or self._first_row is None:
            return False
        location, row = self._first_row
        try:
            return is_list_column(row, find_label_column(row, self.target))
        except ColumnError as error:
            raise DataError(f"{location}: {error}") from None

    def _collect_classes(self) -> tuple[str, ...] | None:
        """Names of the classes in the data; None without data."""
        from data.labeled_rows import collect_classes, find_label_column

        source = self.sources.get("train") or next(iter(self.sources.values()), None)
        if source is None or self._first_row is None:
            return None
        location, first_row = self._first_row
        try:
            column = find_label_column(first_row, self.target)
            return collect_classes((row.get(column) for _, row in source.read_rows()), column)
        except ColumnError as error:
            raise DataError(f"{location}: {error}") from None

    def _read_class_names(self, source: Source) -> tuple[str, ...] | None:
        """Class names of a data source's target column; None if it is no ClassLabel column."""
        if self.row_format == "language_modeling" or self.row_type not in (None, "labeled"):
            return None
        first_row = _read_first_row(source)
        if self.row_type == "labeled":
            return self._read_label_column_names(source, first_row)
        if first_row is None or self._has_conversation(first_row[1]):
            return None
        column = getattr(
            self._complete_prompt_target(*first_row).target, "single_placeholder_column", None
        )
        return None if column is None else source.read_class_names(column)

    def _read_label_column_names(
        self, source: Source, first_row: tuple[FileLocation, Row] | None
    ) -> tuple[str, ...] | None:
        """Class names of the label's column in a data source; None if it is no ClassLabel."""
        from data.labeled_rows import find_label_column

        if first_row is None:
            return None
        location, row = first_row
        try:
            return source.read_class_names(find_label_column(row, self.target))
        except ColumnError as error:
            raise DataError(f"{location}: {error}") from None

    def _make_class_labels(self, source: Source) -> ClassLabels | None:
        """Create the class labels that the values in a source's target column stand for."""
        if self.labels is None:
            return None
        names = self._read_class_names(source)
        if names is None:
            return ClassLabels(self.labels)
        return match_column_labels(names, self.labels, self.user_labels is not None, source.name)

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of metrics of embeddings or answers; empty for documents and preferences."""
        if self.row_type == "contrastive":
            return RETRIEVAL_METRICS
        if self.row_type or self.row_format == "language_modeling":
            return ()
        return (
            ("accuracy", "macro_f1") if self.labels else ("exact_match", "rouge_l", "bleu", "chrf")
        )

    def read_corpus(self, split: Split) -> Corpus:
        """Read the examples of a data split whose rows are texts, not conversations.

        See `read_splits`.
        """
        return self.read_splits(split)[split]

    def read_splits(
        self,
        split: Split,
        reader: ConversationReader | None = None,
        data_warnings: DataWarnings | None = None,
    ) -> dict[Split, Corpus]:
        """Read the examples of a data split, and of the validation split held out from it.

        Args:
            reader: converts conversations, if the task has them; no example may be left then.
            data_warnings: warnings about the rows are added to it.

        Raises:
            UserError: there is no such data, or it does not fit the task.
        """
        source = self.source_of_split(split)
        rows = tqdm(
            source.read_rows(), unit=" rows", delay=2, leave=False,
            disable=not is_first_process() or None,
        )  # fmt: skip
        examples = list(self.convert_rows(rows, self.row_schema(source), reader, data_warnings))
        if not examples and reader is None:
            raise DataError(f"{source.name} holds no examples: give data that has some")
        return self.assign_examples_to_splits(examples, split)

    def source_of_split(self, split: Split) -> Source:
        """Data source that holds the rows of a split.

        Raises:
            DataError: nothing says it.
        """
        source_split: Split = "train" if self.validation_fraction is not None else split
        if source_split not in self.sources:
            raise DataError(
                f"there is no data for {split}: give --data.{split} "
                f"FILE{self._suggest_validation_fraction(split)}"
            )
        return self.sources[source_split]

    def row_schema(self, source: Source) -> RowSchema:
        """Templates and class labels for the rows of a data source, from its first row."""
        labels = self._make_class_labels(source)
        if self.row_format != "prompt_completion" or self.row_type:
            return RowSchema(None, labels)
        if self.prompt is not None and self.target is not None:
            return RowSchema(PromptTarget(self.prompt, self.target), labels)
        first_row = _read_first_row(source)
        return RowSchema(
            None if first_row is None else self._complete_prompt_target(*first_row), labels
        )

    def convert_rows(
        self,
        rows: Iterable[tuple[FileLocation, Row]],
        row_schema: RowSchema,
        reader: ConversationReader | None,
        data_warnings: DataWarnings | None = None,
    ) -> Iterator[tuple[FileLocation, Example | int]]:
        """Convert rows to examples; yields each with its location, or the reason to drop it.

        Args:
            row_schema: templates and labels of the rows.
            reader, data_warnings: see `read_splits`.

        Raises:
            DataError: one does not fit the task.
        """
        for location, row in rows:
            row = with_language_columns(row)
            if self.on_null == "empty" and None in row.values():
                row = {name: "" if value is None else value for name, value in row.items()}
            try:
                languages = self.languages.row_languages(row)
                for example in self._convert_row(location, row, row_schema, reader):
                    if isinstance(example, Example):
                        example = example.with_languages(languages)
                    yield location, example
                if data_warnings is not None and self.is_user_data:
                    data_warnings.check_row(
                        location,
                        self.languages.without_language_names(row),
                        self._used_columns(location, row, row_schema.pair, reader),
                    )
                    if self.row_type == "contrastive":
                        from data.contrastive_rows import read_negatives

                        for unread in read_negatives(row)[self.num_negatives :]:
                            from data.data_warnings import UNUSED_NEGATIVES

                            data_warnings.count_warning(
                                UNUSED_NEGATIVES, "negatives", location, unread
                            )
            except NullError as error:
                if self.on_null == "error":
                    raise DataError(
                        f"{location}: {error}: --data.on_null skip leaves such rows out"
                    ) from None
                yield location, NULL_VALUE
            except ColumnError as error:
                raise DataError(f"{location}: {error}") from None

    def _convert_row(
        self,
        location: FileLocation,
        row: Row,
        row_schema: RowSchema,
        reader: ConversationReader | None,
    ) -> Iterable[Example | int]:
        if self.row_type in LABELED:
            return self._convert_labeled_row(location, row, row_schema.labels, reader)
        if self.row_type == "contrastive":
            from data.contrastive_rows import read_contrastive_texts

            texts = read_contrastive_texts(row, self.num_negatives, self.prompt, self.target)
            for text in texts:
                _check_text_length(text.target)
            return texts
        if self.row_type == "compared":
            return self._convert_compared_row(location, row, reader)
        if self.row_type == "rollout":
            return self._convert_rollout_row(location, row, reader)
        if self.row_type is not None:
            return self._convert_preference_row(location, row, reader)
        if reader is not None:
            conversation = self._read_row_conversation(location, row, row_schema.labels)
            example = (
                conversation
                if isinstance(conversation, int)
                else reader.example_or_none(location, conversation)
            )
            if isinstance(example, Example) and row_schema.labels is not None:
                row_schema.labels.split_at_label(example.target)  # its last answer must be one
            return [] if example is None else [example]
        if self.row_format == "language_modeling":
            return self._convert_document_row(row)
        return [
            self._convert_text_row(
                row,
                row_schema.pair or self._complete_prompt_target(location, row),
                row_schema.labels,
            )
        ]

    def _used_columns(
        self,
        location: FileLocation,
        row: Row,
        prompt_target: PromptTarget | None,
        reader: ConversationReader | None,
    ) -> set[str]:
        """Columns of a row that are rendered to text or control the rendering."""
        if self.row_type is not None:
            return self._used_columns_of_row_type(row, reader is not None)
        if reader is None and self.row_format == "language_modeling":
            return {*(self.target or DOCUMENT_TEMPLATE).columns}
        if reader is None:
            pair = prompt_target or self._complete_prompt_target(location, row)
            return {*pair.used_columns}
        from data.conversations import QUESTION_COLUMNS, conversation_columns

        if self._has_conversation(row):
            return conversation_columns(row, self.messages)
        pair = prompt_target or self._complete_prompt_target(location, row)
        return {*pair.used_columns, *QUESTION_COLUMNS}

    def _used_columns_of_row_type(self, row: Row, are_conversations: bool) -> set[str]:
        """Columns of a row that an objective with rows of its own reads."""
        from data.contrastive_rows import contrastive_columns
        from data.conversations import conversation_columns
        from data.labeled_rows import find_label_column, labeled_text_template
        from data.preference_rows import preference_columns
        from data.reward_rows import reward_columns
        from data.rollout_rows import rollout_columns

        if self.row_type in LABELED:
            label = find_label_column(row, self.target)
            if are_conversations:
                return {label, *conversation_columns(row, self.messages)}
            template = labeled_text_template(row, self.prompt)
            return {label, *template.columns, *getattr(template, "optional", ())}
        if self.row_type == "contrastive":
            return contrastive_columns(row, self.prompt, self.target)
        prompt_columns = () if self.prompt is None else self.prompt.columns
        if self.row_type == "compared":
            return {*prompt_columns, *reward_columns(are_conversations)}
        if self.row_type == "rollout":
            return {*prompt_columns, *rollout_columns(are_conversations)}
        unpaired = self.row_type == "unpaired"
        return {*prompt_columns, *preference_columns(unpaired, are_conversations)}

    def _has_conversation(self, row: Row) -> bool:
        if self.prompt is not None:
            return False
        from data.conversations import has_conversation

        return has_conversation(row, self.messages)

    def _read_row_conversation(
        self, location: FileLocation, row: Row, labels: ClassLabels | None
    ) -> Conversation | int:
        """Conversation in a row; or, as an integer, the reason why the row is dropped."""
        from data.conversations import make_conversation, read_conversation

        if self._has_conversation(row):
            conversation = read_conversation(row, self.messages, self.on_null == "empty")
            return conversation.with_system_message(self.system)
        example = self._convert_text_row(row, self._complete_prompt_target(location, row), labels)
        if isinstance(example, int):
            return example
        conversation = make_conversation(row, example.prompt, example.target)
        return conversation.with_system_message(self.system)

    def _convert_preference_row(
        self, location: FileLocation, row: Row, reader: ConversationReader | None
    ) -> list[Example]:
        """Examples from a row of preference data; empty if the chat template rejects one."""
        from data.conversations import Conversation
        from data.preference_rows import read_answers

        prompt = None if self.prompt is None else self.prompt.render(row)
        examples = list[Example]()
        unpaired = self.row_type == "unpaired"
        for answer, desirable in read_answers(row, unpaired, prompt, reader is not None):
            if isinstance(answer, Conversation):
                assert reader is not None
                example = reader.example_or_none(location, answer.with_system_message(self.system))
                if example is None:
                    return []
                answer = example
            for text in (answer.prompt, answer.target):
                _check_text_length(text)
            examples.append(answer.with_kto_label(desirable))
        return examples

    def _convert_labeled_row(
        self,
        location: FileLocation,
        row: Row,
        classes: ClassLabels | None,
        reader: ConversationReader | None,
    ) -> list[Example | int]:
        """Example from a labeled row; empty if the chat template rejects it."""
        from data.conversations import read_conversation
        from data.labeled_rows import find_label_column, labeled_text_template, read_label

        column = find_label_column(row, self.target)
        label = read_label(row, column, classes, self.labels_are_lists)
        if label is None:
            return [UNLABELED]
        if reader is None:
            text: str | None = labeled_text_template(row, self.prompt).render(row)
        else:
            conversation = read_conversation(row, self.messages, self.on_null == "empty")
            text = reader.text_or_none(location, conversation.with_system_message(self.system))
        return [] if text is None else [Example(_check_text_length(text), "", label=label)]

    def _convert_compared_row(
        self, location: FileLocation, row: Row, reader: ConversationReader | None
    ) -> list[Example]:
        """Examples of a row's chosen and rejected text; empty if the chat template rejects one."""
        from data.reward_rows import (
            read_chosen_rejected_conversations,
            read_chosen_rejected_texts,
            read_margin,
        )

        prompt, margin = None if self.prompt is None else self.prompt.render(row), read_margin(row)
        if reader is None:
            texts: list[str | None] = [*read_chosen_rejected_texts(row, prompt)]
        else:
            texts = [
                reader.text_or_none(location, conversation.with_system_message(self.system))
                for conversation in read_chosen_rejected_conversations(row, prompt)
            ]
        whole = [_check_text_length(text) for text in texts if text is not None]
        if len(whole) < len(texts):
            return []
        return [Example(text, "", label=margin) for text in whole]

    def _convert_rollout_row(
        self, location: FileLocation, row: Row, reader: ConversationReader | None
    ) -> list[Example]:
        """Example from a row of rollouts; empty if the chat template rejects it."""
        from data.conversations import Conversation
        from data.rollout_rows import read_rollout

        prompt = None if self.prompt is None else self.prompt.render(row)
        content, rollout = read_rollout(row, prompt, reader is not None)
        if isinstance(content, Conversation):
            assert reader is not None
            example = reader.example_or_none(location, content.with_system_message(self.system))
            if example is None:
                return []
            content = example
        for text in (content.prompt, content.target):
            _check_text_length(text)
        return [content.with_rollout(rollout)]

    def _convert_document_row(self, row: Row) -> list[Example]:
        from data.document_chunks import DocumentChunkRow, split_into_chunks

        if isinstance(row, DocumentChunkRow):
            return [Example("", row["text"], doc_chunk=row.doc_chunk)]
        text = (self.target or DOCUMENT_TEMPLATE).render(row)
        return [Example("", piece, doc_chunk=part) for piece, part in split_into_chunks([text])]

    def _complete_prompt_target(self, location: FileLocation, row: Row) -> PromptTarget:
        prompt, target = self.prompt, self.target
        if prompt is None and target is None:
            templates = self.languages.find_text_templates(row)
            prompt, target = (None, None) if None in templates else templates
        return complete_prompt_target(location, row, prompt, target)

    def read_prompt_conversation(self, row: Row) -> Conversation:
        """Conversation in a row, without the last answer, which the model is to generate.

        Raises:
            ColumnError: it has neither messages nor a prompt.
        """
        from data.conversations import has_conversation, make_conversation, read_conversation

        if has_conversation(row, self.messages):
            conversation = read_conversation(row, self.messages).without_last_answer()
            if not conversation.messages:
                raise ColumnError("there are no messages to answer")
        else:
            conversation = make_conversation(row, self.render_prompt(row), None)
        return conversation.with_system_message(self.system)

    def _suggest_validation_fraction(self, split: Split) -> str:
        """Advice for an error message: use some of the training data for validation."""
        has_rows = split == "validation" and "train" in self.sources
        return ", or a fraction such as 0.05 of the training data" if has_rows else ""

    def assign_examples_to_splits(
        self, rows: Iterable[tuple[FileLocation, Example | int]], split: Split
    ) -> dict[Split, Corpus]:
        """Assign examples to splits of shared data; equal prompts go to the same split.

        Raises:
            DataError: the fraction that is held out leaves nothing for one.
        """
        by_split: dict[Split, list[tuple[FileLocation, Example]]] = {
            name: [] for name in self.splits_sharing_source(split)
        }
        dropped = {UNLABELED: 0, NULL_VALUE: 0}
        for location, example in rows:
            if isinstance(example, int):
                dropped[example] += 1
                continue
            name = self.split_of_example(example, split)
            if name in by_split:
                by_split[name].append((location, example))
        splits = {
            name: Corpus(
                [example for _, example in located],
                unlabeled=dropped[UNLABELED],
                nulls=dropped[NULL_VALUE],
                locations=[location for location, _ in located],
            )
            for name, located in by_split.items()
        }
        self.check_examples_left(split, splits)
        self.check_validation_split(splits)
        return splits

    def splits_sharing_source(self, split: Split) -> tuple[Split, ...]:
        """Splits that must be read together with `split`, as they share its data source."""
        reads_both = self.validation_fraction is not None and split == "train"
        return ("train", "validation") if reads_both else (split,)

    def split_of_example(self, example: Example, split: Split) -> Split:
        """Split, training or validation, that an example of shared data is assigned to."""
        if self.validation_fraction is None:
            return split
        return (
            "validation" if _hash_to_unit_interval(example) < self.validation_fraction else "train"
        )

    def check_examples_left(self, split: Split, splits: Mapping[Split, Corpus]) -> None:
        """Raise DataError if all rows of a data split were dropped."""
        if any(corpus.examples for corpus in splits.values()):
            return
        unlabelled, nulls = splits[split].unlabeled, splits[split].nulls
        name = self.source_of_split(split).name
        if unlabelled:
            raise DataError(
                f"{unlabelled} rows of {format_path(name)} are without a label ({UNLABELED}), and "
                f"none is left for {split}: give a split that has labels"
            )
        if nulls:
            raise DataError(
                f"all {nulls} rows of {format_path(name)} have null where text is needed, and none "
                f"is left for {split}: give data that has some"
            )

    def check_validation_split(self, splits: Mapping[Split, Corpus]) -> None:
        """Raise DataError if the fraction held out for validation leaves a split empty."""
        for name, corpus in splits.items() if self.validation_fraction is not None else ():
            if not corpus.examples:
                raise DataError(
                    f"--data.validation {self.validation_fraction:g} leaves none for {name}: give "
                    "another fraction, or a file"
                )

    def _convert_text_row(
        self, row: Row, prompt_target: PromptTarget, labels: ClassLabels | None
    ) -> Example | int:
        answer: str | None = _check_text_length(prompt_target.target.render(row))
        if labels is not None:
            is_value = getattr(prompt_target.target, "single_placeholder_column", None) is not None
            answer = labels.label_from_cell(str(answer), is_value)
        return (
            UNLABELED
            if answer is None
            else Example(_check_text_length(prompt_target.prompt.render(row)), answer)
        )

    def render_prompt(self, row: Row) -> str:
        """Render the prompt of a data row, which can lack the columns of the target.

        Raises:
            ColumnError: it has neither the task's columns nor usual ones.
        """
        row = with_language_columns(row)
        templates = [pair.prompt for pair in COMMON_COLUMNS]
        own_template = self.prompt or self.languages.find_text_templates(row)[0]
        for template in [*([] if own_template is None else [own_template]), *templates]:
            if set(template.columns) <= row.keys():
                return _check_text_length(template.render(row))
        return _check_text_length((self.prompt or templates[0]).render(row))


_NLI_TASK = Task(
    "mnli",
    {
        "train": HubDataset("glue", "mnli", "train"),
        "validation": HubDataset("glue", "mnli", "validation_mismatched"),
    },
    Template("mnli hypothesis: {hypothesis} premise: {premise}"),
    Template("{label}"),
    NLI_LABELS,
    fixed_separator=" target:",
)
TASKS: dict[str, Task] = {
    "mnli": _NLI_TASK,
    "sample": replace(
        _NLI_TASK,
        name="sample",
        sources={s: FileSource(str(SAMPLE_FOLDER / f"{s}.jsonl")) for s in ("train", "validation")},
    ),
}
"""Built-in tasks, by the name in `data.dataset`."""


def task_from_config(data: Data, row_type: RowType | None = None, num_negatives: int = 0) -> Task:
    """Create the configured task: `data.dataset`, or that of the user's files.

    Args:
        row_type, num_negatives: see `Task`.

    Raises:
        DataError: a template cannot be read, or there is one label only.
    """
    names_by_split: dict[Split, str | None] = {"train": data.train, "validation": data.validation}
    files = {split: name for split, name in names_by_split.items() if name is not None}
    task, has_mixture = TASKS[data.dataset], data.is_mixture
    validation_fraction = _parse_validation_fraction(data.validation)
    if validation_fraction is not None and has_mixture:
        raise DataError(
            f"data.validation is {validation_fraction:g}, but no fraction of a mixture is held "
            "out: name a file"
        )
    if validation_fraction is not None:
        del files["validation"]
    if has_mixture:
        del files["train"]
    if files or has_mixture:
        sources = {split: source_from_name(name, split) for split, name in files.items()}
        task = Task("own data", sources, None, None)
    task = replace(
        task,
        sources={split: copy(source) for split, source in task.sources.items()},
        validation_fraction=validation_fraction,
        on_null=data.on_null,
        format=data.format,
        messages=data.messages,
        system=data.system,
        row_type=row_type,
        num_negatives=num_negatives,
    )
    try:
        task = replace(task, languages=TranslationLanguages.from_config(data))
        if data.prompt is not None:
            task = replace(task, prompt=Template(data.prompt), fixed_separator="")
        if data.target is not None:
            task = replace(task, target=Template(data.target))
    except UserError:
        raise
    except ValueError as error:
        raise DataError(str(error)) from None
    labels = None if data.class_labels is None else ClassLabels.parse(data.class_labels).names
    return task if labels is None else replace(task, user_labels=labels)


def check_task_and_files(data: Data) -> None:
    """Raise UserError if the task is invalid or its local files are missing; reads no data."""
    for source in task_from_config(data).sources.values():
        source.check_local_files()
    if data.is_mixture:
        from data.mixture import read_mixture

        for mixture_source in read_mixture(data):
            check_task_and_files(mixture_source.data)


def _read_first_row(source: Source) -> tuple[FileLocation, Row] | None:
    """First row of a data source; a translation has a column for each of its languages."""
    first = next(iter(source.read_rows()), None)
    return None if first is None else (first[0], with_language_columns(first[1]))


def _parse_validation_fraction(validation: str | None) -> float | None:
    """Parse the validation fraction in `data.validation`; None if it is no number.

    Raises:
        DataError: a number that is no fraction.
    """
    if validation is None or Path(validation).exists():
        return None
    try:
        fraction = float(validation)
    except ValueError:
        return None
    if not 0 < fraction < 1:
        raise DataError(
            f"data.validation is {validation}, but a fraction of the training data is between 0 "
            "and 1"
        )
    return fraction


def _hash_to_unit_interval(example: Example) -> float:
    """Hash a prompt or document chunk to a number in [0, 1), which selects its split."""
    text = example.target if example.doc_chunk else example.prompt
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).digest()
    return float(int.from_bytes(digest[:8], "big") / 2**64)


def _check_text_length(text: str) -> str:
    """Return a text; raises ColumnError if it has more than `MAX_CHARACTERS` characters.

    Raises:
        ColumnError: it is that long.
    """
    if len(text) > MAX_CHARACTERS:
        raise ColumnError(
            f"a text of {len(text):,} characters, but at most {MAX_CHARACTERS:,} are read: cut it"
        )
    return text
