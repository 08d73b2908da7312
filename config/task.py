"""Config sections of the data: files, templates, formats and the tokens in the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from config.base import ConfigSection
from config.values import Lengths, NonNegativeInt, PathText, PositiveInt

DataFormat = Literal["prompt_completion", "conversational", "language_modeling"]
"""Formats of data sets, in TRL's names."""
OnNull = Literal["error", "skip", "empty"]
OnLongTarget = Literal["error", "truncate", "skip"]
LossOn = Literal["all", "completion", "last_turn"]


@dataclass(frozen=True)
class Data(ConfigSection):
    """Data settings that all model families share."""

    dataset: Literal["sample", "mnli"] = "mnli"
    """The task, unless files are given: the corpus in data/sample, or GLUE/MNLI from the hub."""

    train: PathText | None = None
    """Training data: files (.jsonl, .json, .csv, .tsv, .txt, .parquet), a folder, or
    NAME[:SUBSET][@SPLIT] of the Hugging Face hub. Several files are separated by commas or a
    pattern, such as 'data/*.jsonl'; text can be .gz; a folder holds files or is of save_to_disk."""

    validation: PathText | None = None
    """The same for evaluation, or a fraction such as 0.05 of the training data to hold out."""

    prompt: str | None = None
    """Template of what the model reads, such as 'summarize: {text}', with columns in braces. null:
    that of the task, or from columns with usual names."""

    target: str | None = None
    """Template of what the model writes, such as '{summary}'. null: as for prompt."""

    source_language: str | None = None
    """Language that the model reads, as its tokenizer names it, such as eng_Latn, en_XX or en, or a
    column that says it, in braces. It also names the column of the text: for en_XX, en too. null:
    the column source_language, source_lang or src_lang of a row, if there is one."""

    target_language: str | None = None
    """Language that the model writes. null: as for source_language."""

    format: DataFormat | None = None
    """Format of the rows. prompt_completion: a prompt and a target. conversational: messages, or
    question and answer, rendered by the chat template. language_modeling: documents, all of whose
    tokens count in the loss. null: conversational for rows with messages, language_modeling for
    .txt and for a column text alone, else prompt_completion."""

    messages: str | None = None
    """Column of conversations. null: messages, conversations or, with lists of messages, prompt."""

    system: str | None = None
    """System message of conversations that have none. null: none."""

    chat_template: PathText | None = None
    """File with a chat template, in Jinja. null: the tokenizer's own."""

    chat_variables: str | None = None
    """JSON object of what a chat template reads besides the messages, such as '{"enable_thinking":
    false}'."""

    class_labels: str | None = None
    """Answers of a classification, separated by commas. A value of the target's column is a name or
    its number from 0. null: those of the task or of a ClassLabel column; else free text."""

    on_null: OnNull = "error"
    """Rows with null where text is needed: end with an error, skip the row, or read an empty
    text."""

    on_long_target: OnLongTarget = "error"
    """Targets longer than the model can write: end with an error, truncate them, or skip the
    example."""

    seed: NonNegativeInt | None = None
    """Seed of the order of the training data. null: model.seed."""

    tokenizer: PathText | None = None
    """Directory or hub name of a tokenizer. null: that of the model and task."""


@dataclass(frozen=True)
class Seq2SeqData(Data):
    """Data settings of encoder-decoder models."""

    examples_per_sample: PositiveInt = 1
    """Most examples that share the tokens of a sample, each for itself. Batch sizes count
    samples."""

    length_buckets: Lengths | None = None
    """Shorter lengths, such as 64,128: a batch has samples of one bucket, padded to its length.
    null: all are padded to sequence_length. HF: group_by_length."""


@dataclass(frozen=True)
class CausalLMData(Data):
    """Data settings of decoder-only models."""

    packing: bool = True
    """Join the texts and cut them into full samples, or, if false, pad each to a sample."""

    loss_on: LossOn | None = None
    """Tokens that count in the loss. all: every token; completion: targets, or the assistant's
    turns; last_turn: the last turn. null: completion of conversations, all of other texts."""

    separator: str | None = None
    """Text between a prompt and what the model writes; a space follows it, unless it is empty or
    there is white space. null: that of the task; for files, nothing."""


@dataclass(frozen=True)
class SegmentsData(CausalLMData):
    """Data settings of decoder-only models whose samples can pack several sequences.

    The sequences do not attend to each other.
    """

    packing: bool = False
    """Join all texts and cut them into full samples; false: samples hold whole texts, see
    examples_per_sample."""

    examples_per_sample: PositiveInt = 16
    """Maximum number of sequences packed into a sample; position ids restart and attention does
    not cross sequences."""
