"""Config sections of the data: files, templates, formats and the tokens in the loss."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from config.base import ConfigSection
from config.values import Lengths, NonNegativeInt, PathText, PositiveInt

DataFormat = Literal["prompt_completion", "conversational", "language_modeling"]
"""Formats of data sets, in TRL's names."""
OnNull = Literal["error", "skip", "empty"]
OnLongTarget = Literal["error", "truncate", "skip"]
LossOn = Literal["all", "completion", "last_turn"]

MIXTURE_SUFFIXES = (".yml", ".yaml")
"""Suffixes of files that mix data sets."""


@dataclass(frozen=True)
class Data(ConfigSection):
    """Data settings that all model families share."""

    dataset: Literal["sample", "mnli"] = "mnli"
    """The task, unless files are given: the corpus in data/sample, or GLUE/MNLI from the hub."""

    train: PathText | None = None
    """Training data: files, with commas or a pattern such as 'data/*.jsonl'; a folder; or
    NAME[:SUBSET][@SPLIT] of the hub. Files are .jsonl, .json, .csv, .tsv, .txt or .parquet, text
    also .gz; a folder has such files or is of save_to_disk."""

    validation: PathText | None = None
    """Evaluation data, or a fraction of the training data to hold out, such as 0.05."""

    prompt: str | None = None
    """Template of the prompt with columns in braces, such as 'summarize: {text}'. null: the task's,
    or from columns with usual names."""

    target: str | None = None
    """Template of the target, such as '{summary}'. null: as for prompt."""

    source_language: str | None = None
    """Language of the input as the tokenizer names it, such as eng_Latn, en_XX or en, or
    '{COLUMN}'; also selects the text's column (en_XX: en too). null: column source_language,
    source_lang or src_lang."""

    target_language: str | None = None
    """Language of the answer, likewise."""

    format: DataFormat | None = None
    """Format of the rows. prompt_completion: prompt and target. conversational: messages, or
    question and answer, rendered by the chat template. language_modeling: documents; every token
    counts in the loss. null: by the columns."""

    messages: str | None = None
    """Column of conversations. null: messages, conversations, or prompt if it has lists of
    messages."""

    system: str | None = None
    """System message of conversations that have none. null: none."""

    chat_template: PathText | None = None
    """File with a Jinja chat template. null: the tokenizer's."""

    chat_variables: str | None = None
    """JSON object of further variables of the chat template, such as '{"enable_thinking":
    false}'."""

    class_labels: str | None = None
    """Labels of a classification, separated by commas; the target is a label or its number from 0.
    null: those of the task or a ClassLabel column, else free text."""

    on_null: OnNull = "error"
    """Rows with null where text is needed: end with an error, skip the row, or read an empty
    text."""

    on_long_target: OnLongTarget = "error"
    """Targets that are too long: end with an error, truncate them, or skip the example."""

    seed: NonNegativeInt | None = None
    """Seed of the order of the training data. null: model.seed."""

    tokenizer: PathText | None = None
    """Directory or hub name of a tokenizer. null: that of the model and task."""

    @property
    def is_mixture(self) -> bool:
        """True if `train` names a mixture file (YAML), not data."""
        return self.train is not None and Path(self.train).suffix.lower() in MIXTURE_SUFFIXES


@dataclass(frozen=True)
class Seq2SeqData(Data):
    """Data settings of encoder-decoder models."""

    examples_per_sample: PositiveInt = 1
    """Maximum number of examples packed into a sample. Batch sizes count samples."""

    length_buckets: Lengths | None = None
    """Shorter lengths, such as 64,128: a batch has samples of one bucket, padded to its length.
    null: pad all to sequence_length. HF: group_by_length."""


@dataclass(frozen=True)
class CausalLMData(Data):
    """Data settings of decoder-only models."""

    packing: bool = True
    """Join the texts and cut them into full samples, or, if false, pad each to a sample."""

    loss_on: LossOn | None = None
    """Tokens that count in the loss. all: every token; completion: targets, or the assistant's
    turns; last_turn: the last turn. null: completion of conversations, else all."""

    separator: str | None = None
    """Text between prompt and target; a space follows it, unless it is empty or has white space.
    null: the task's; for files, nothing."""


@dataclass(frozen=True)
class SegmentsData(CausalLMData):
    """Data settings of decoder-only models whose samples can pack several sequences.

    The sequences do not attend to each other.
    """

    packing: bool = False
    """Join all texts and cut them into full samples; false: samples hold whole texts."""

    examples_per_sample: PositiveInt = 16
    """Maximum number of sequences packed into a sample; attention does not cross them."""
