"""A task is one record: its data, what the model reads and writes, and how that is judged."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Protocol

from tqdm import tqdm

from config.sections import Data
from data.conversations import (
    Conversation,
    conversation_of,
    has_conversation,
    question_and_answer,
)
from data.rows import DataError, File, HubDataset, Row, Source, source_of
from data.template import ColumnError, Instruction, NullError, Template
from data.texts import MAX_CHARACTERS, Corpus, Example
from files.location import FileLocation
from files.shown import shown, shown_name
from terminal.screen import is_first_process

Split = Literal["train", "validation"]

SAMPLE_FOLDER = Path(__file__).parent / "sample"
NLI_LABELS = ("entailment", "neutral", "contradiction")
UNLABELLED = -1
"""Label of examples without one, in data sets that count labels."""

NULL = -2
"""Stands for an example whose row lacks a value that is needed."""


class Reader(Protocol):
    """How a conversation becomes an example."""

    def read(self, place: FileLocation, conversation: Conversation) -> Example | None:
        """None: it is left out, which the reader notes."""
        ...


class Form(Protocol):
    """How a row becomes text."""

    @property
    def columns(self) -> tuple[str, ...]: ...

    def render(self, row: Mapping[str, Any]) -> str: ...


@dataclass(frozen=True)
class Task:
    """What a model is trained for.

    Attributes:
        name: for people.
        sources: by split; one may be missing where it is not needed.
        prompt: what the model reads.
        target: what it should write. A number in its only column is the index of a label.
        labels: the answers there are, each an exact text; None: free text.
        held_out: the fraction of the training data that is the validation split; None: that has
            data of its own.
        nulls: see `Data.nulls`.
        format, messages, system: as in the configuration.
    """

    name: str
    sources: Mapping[Split, Source]
    prompt: Form | None
    target: Form | None
    labels: tuple[str, ...] | None = None
    held_out: float | None = None
    nulls: Literal["refuse", "skip", "empty"] = "refuse"
    format: Literal["text", "chat"] | None = None
    messages: str | None = None
    system: str | None = None

    @property
    def is_chat(self) -> bool:
        """Whether its examples are conversations: as its format says, else its first row.

        Raises:
            UserError: there is no such row, or it cannot be read.
        """
        if self.format is not None or (self.prompt is not None and self.target is not None):
            return self.format == "chat"
        if self.messages is not None:
            return True
        source = next(iter(self.sources.values()))
        return any(has_conversation(row) for _, row in islice(source.rows(), 1))

    @property
    def metrics(self) -> tuple[str, ...]:
        """What generated answers are judged by."""
        return ("accuracy",) if self.labels else ("exact_match", "rouge_l", "bleu")

    def corpus(self, split: Split) -> Corpus:
        """The examples of a split whose rows are texts; see `corpora`."""
        return self.corpora(split)[split]

    def corpora(self, split: Split, chat: Reader | None = None) -> dict[Split, Corpus]:
        """The examples of a split, in the order of the data; with those of training come those that
        are held out of them.

        Args:
            chat: what reads conversations, if the task has them; there may be none left then.

        Raises:
            UserError: there is no such data, or it does not fit the task.
        """
        where: Split = "train" if self.held_out is not None else split
        if where not in self.sources:
            raise DataError(
                f"there is no data for {split}: give --data.{split} FILE{self._or(split)}"
            )
        source = self.sources[where]
        if chat is not None:
            talks_there = tqdm(
                self._conversations(source), unit=" conversations", delay=2, leave=False,
                disable=not is_first_process() or None,
            )  # fmt: skip
            read = (chat.read(*placed) for placed in talks_there)
            talks = [example for example in read if example is not None]
            return self._splits(talks, split) if talks else {split: Corpus([])}
        rows = list(self._examples(source))
        left_out = [rows.count(why) for why in (UNLABELLED, NULL)]
        examples = [example for example in rows if isinstance(example, Example)]
        if not examples:
            raise DataError(f"{source.name} holds no examples: give data that has some")
        return self._splits(examples, split, *left_out)

    def _conversations(self, source: Source) -> Iterator[tuple[FileLocation, Conversation]]:
        forms: tuple[Form, Form] | None = None
        for place, row in source.rows():
            try:
                if self.prompt is None and has_conversation(row, self.messages):
                    talk = conversation_of(row, self.messages)
                else:
                    forms = forms or self._forms(place, row)
                    example = self._example(row, *forms)
                    if not isinstance(example, Example):
                        continue  # it has no label
                    talk = question_and_answer(row, example.prompt, example.target)
            except ColumnError as error:
                raise DataError(f"{place}: {error}") from None
            yield place, talk.with_system(self.system)

    def asked(self, row: Row) -> Conversation:
        """What a row asks: a conversation without the answer at its end, or a question.

        Raises:
            ColumnError: it has neither messages nor a prompt.
        """
        if has_conversation(row, self.messages):
            talk = conversation_of(row, self.messages).before_answer()
        else:
            talk = question_and_answer(row, self.prompt_of(row), None)
        return talk.with_system(self.system)

    def _or(self, split: Split) -> str:
        """Another way to give data of a split, where there is one."""
        has_rows = split == "validation" and "train" in self.sources
        return ", or a fraction such as 0.05 of the training data" if has_rows else ""

    def _splits(self, examples: list[Example], split: Split, *left_out: int) -> dict[Split, Corpus]:
        """A corpus of all examples; where both splits share a source, each prompt belongs to only
        one of them."""
        if self.held_out is None:
            return {split: Corpus(examples, *left_out)}
        wanted: tuple[Split, ...] = ("train", "validation") if split == "train" else (split,)
        corpora = {name: Corpus([], *left_out) for name in wanted}
        for example in examples:
            name: Split = "validation" if _place_of(example) < self.held_out else "train"
            if name in corpora:
                corpora[name].examples.append(example)
        for name, corpus in corpora.items():
            if not corpus.examples:
                raise DataError(
                    f"--data.validation {self.held_out:g} of {len(examples)} examples leaves none "
                    f"for {name}: give another fraction, or a file"
                )
        return corpora

    def _examples(self, source: Source) -> Iterator[Example | int]:
        """Each row's example, or why it is left out: `UNLABELLED` or `NULL`."""
        forms: tuple[Form, Form] | None = None
        for place, row in source.rows():
            forms = forms or self._forms(place, row)
            if self.nulls == "empty":
                row = {name: "" if value is None else value for name, value in row.items()}
            try:
                yield self._example(row, *forms)
            except NullError as error:
                if self.nulls == "refuse":
                    raise DataError(
                        f"{place}: {error}: --data.nulls skip leaves such rows out"
                    ) from None
                yield NULL
            except ColumnError as error:
                raise DataError(f"{place}: {error}") from None

    def _example(self, row: Row, prompt: Form, target: Form) -> Example | int:
        answer = _bounded(target.render(row))
        if self.labels is not None:
            if answer == str(UNLABELLED):
                return UNLABELLED
            answer = self._label(answer)
        return Example(_bounded(prompt.render(row)), answer)

    def _label(self, answer: str) -> str:
        assert self.labels is not None
        if answer in self.labels:
            return answer
        if answer.isdecimal() and len(answer) < 10 and int(answer) < len(self.labels):
            return self.labels[int(answer)]
        known = shown_name(", ".join(self.labels), 150)
        raise ColumnError(f"the label {shown(answer)} is none of {known}")

    def prompt_of(self, row: Row) -> str:
        """What the model reads for a row, which need not have the target's columns.

        Raises:
            ColumnError: it has neither the task's columns nor usual ones.
        """
        forms = [prompt for prompt, _ in USUAL_FORMS]
        for form in [*([] if self.prompt is None else [self.prompt]), *forms]:
            if set(form.columns) <= row.keys():
                return _bounded(form.render(row))
        return _bounded((self.prompt or forms[0]).render(row))

    def _forms(self, place: FileLocation, row: Row) -> tuple[Form, Form]:
        """The task's forms, or, if it has none, those that fit the row's columns."""
        if self.prompt is not None and self.target is not None:
            return self.prompt, self.target
        for prompt, target in USUAL_FORMS:
            if {*prompt.columns, *target.columns} <= row.keys():
                return self.prompt or prompt, self.target or target
        columns = shown_name(", ".join(map(str, row)) or "none")
        raise DataError(
            f"{place}: the columns are {columns}, which have no usual meaning: say what "
            "the model reads and writes, such as "
            "--data.prompt 'summarize: {text}' --data.target '{summary}'"
        )


USUAL_FORMS: Sequence[tuple[Form, Form]] = (
    (Template("{prompt}"), Template("{completion}")),
    (Instruction(), Template("{output}")),
)
"""Columns that need no template: those of OpenAI's fine-tuning files, and of Alpaca's."""

_NLI = Task(
    "mnli",
    {
        "train": HubDataset("glue", "mnli", "train"),
        "validation": HubDataset("glue", "mnli", "validation_mismatched"),
    },
    Template("mnli hypothesis: {hypothesis} premise: {premise}"),
    Template("{label}"),
    NLI_LABELS,
)
TASKS: dict[str, Task] = {
    "mnli": _NLI,
    "sample": replace(
        _NLI,
        name="sample",
        sources={s: File(str(SAMPLE_FOLDER / f"{s}.jsonl")) for s in ("train", "validation")},
    ),
}
"""Tasks by the name that `data.dataset` has."""


def task_of(data: Data) -> Task:
    """The configured task: `data.dataset`, or that of the files that are given.

    Raises:
        DataError: a template cannot be read, or there is one label only.
    """
    given: dict[Split, str | None] = {"train": data.train, "validation": data.validation}
    files = {split: name for split, name in given.items() if name is not None}
    task = TASKS[data.dataset]
    held_out = _fraction(data.validation)
    if held_out is not None:
        del files["validation"]
    if files:
        sources = {split: source_of(name, split) for split, name in files.items()}
        task = Task("own data", sources, None, None)
    task = replace(
        task,
        held_out=held_out,
        nulls=data.nulls,
        format=data.format,
        messages=data.messages,
        system=data.system,
    )
    try:
        if data.prompt is not None:
            task = replace(task, prompt=Template(data.prompt))
        if data.target is not None:
            task = replace(task, target=Template(data.target))
    except ValueError as error:
        raise DataError(str(error)) from None
    return task if data.labels is None else replace(task, labels=_labels(data.labels))


def _fraction(validation: str | None) -> float | None:
    """The fraction of the training data that is to be the validation split; None: it is no number.

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


def _place_of(example: Example) -> float:
    """A pseudo-random number from 0 to 1 that depends on the prompt alone."""
    digest = hashlib.sha256(example.prompt.encode(errors="surrogatepass")).digest()
    return float(int.from_bytes(digest[:8], "big") / 2**64)


def _bounded(text: str) -> str:
    """The text, unless it would keep a tokenizer busy for minutes and gigabytes.

    Raises:
        ColumnError: it is that long.
    """
    if len(text) > MAX_CHARACTERS:
        raise ColumnError(
            f"a text of {len(text):,} characters, but at most {MAX_CHARACTERS:,} are read: cut it"
        )
    return text


def _labels(text: str) -> tuple[str, ...]:
    labels = tuple(label.strip() for label in text.split(","))
    if len(labels) < 2 or len(set(labels)) < len(labels) or not all(labels):
        raise DataError(
            f"data.labels is {shown(text)}, but must name two or more, each once, separated by "
            "commas"
        )
    return labels
