"""What describes a task: what a model reads and writes, and the data that say so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from config.base import Section
from config.values import NonNegativeInt, PathText, PositiveInt


@dataclass(frozen=True)
class Data(Section):
    """The task: what the model reads and writes."""

    dataset: Literal["sample", "mnli"] = "mnli"
    """The task, unless files are given. sample: the corpus in data/sample; mnli: GLUE/MNLI,
    downloaded when it is not cached."""

    train: PathText | None = None
    """Examples to train on: files (.jsonl, .json, .csv, .tsv, also .gz; .parquet), separated by
    commas or as a pattern such as 'data/*.jsonl', or NAME[:SUBSET][@SPLIT] of a data set of the
    Hugging Face hub."""

    validation: PathText | None = None
    """The same for evaluation; or a fraction such as 0.05 of the training data, which is then left
    out of training. A row's prompt decides whether it belongs to it."""

    prompt: str | None = None
    """Template of what the model reads, such as 'summarize: {text}', with columns in braces. null:
    that of the task, or from columns with usual names (prompt, completion; instruction, input,
    output)."""

    target: str | None = None
    """Template of what the model should write, such as '{summary}'. null: as for prompt."""

    format: Literal["text", "chat"] | None = None
    """text: a prompt and a target. chat: conversations, written by the tokenizer's chat template; a
    prompt and a target are a question of the user and the assistant's answer. null: chat for rows
    with messages."""

    messages: str | None = None
    """Column of conversations. null: messages, conversations or, with lists of messages, prompt."""

    system: str | None = None
    """The system's message of conversations that have none. null: none."""

    chat_template: PathText | None = None
    """File with a chat template, in Jinja. null: the tokenizer's own."""

    chat_variables: str | None = None
    """What a chat template is given besides the messages, a JSON object: '{"enable_thinking":
    false}' for Qwen3."""

    labels: str | None = None
    """The answers of a classification task, separated by commas. A number in the target's column
    is the index of one. null: those of the task; for files, free text."""

    nulls: Literal["refuse", "skip", "empty"] = "refuse"
    """Rows with null in a column that is needed: end with an error, leave them out, or take null
    for an empty text."""

    long_targets: Literal["refuse", "cut", "drop"] = "refuse"
    """Targets longer than what the model may write: end with an error, cut them, or leave such
    examples out."""

    seed: NonNegativeInt | None = None
    """Seed of the order of the training data. null: model.seed."""

    tokenizer: PathText | None = None
    """Directory or hub name of a tokenizer. null: the one that belongs to the model and task."""


@dataclass(frozen=True)
class Seq2SeqData(Data):
    """The task of an encoder-decoder."""

    examples_per_row: PositiveInt = 1
    """Most examples that share the model.sequence_length tokens of a sample, each for itself: at 1
    a short one leaves the rest of its sample to padding. Batch sizes count samples."""


@dataclass(frozen=True)
class CausalLMData(Data):
    """The task of a language model, which reads and writes one stream."""

    packing: bool = True
    """Join the texts and cut them into full samples, or, if false, pad each to a sample."""

    loss: Literal["all", "answers", "last"] | None = None
    """What is learned. all: each token; answers: targets, or the assistant's turns; last: the
    last turn alone. null: answers of conversations, all of other texts."""

    separator: str = ""
    """Text between a prompt and what the model writes."""


@dataclass(frozen=True)
class SegmentsData(CausalLMData):
    """The task of a language model whose samples may hold several texts that do not see another."""

    packing: bool = False
    """Cut all texts, joined, into full samples, which tears some apart and lets each see those
    before it; if false, samples hold whole texts, see examples_per_row."""

    examples_per_row: PositiveInt = 16
    """Most texts that share the tokens of a sample, each for itself: positions start anew, and none
    sees another. At 1 a short one leaves the rest of its sample to padding."""
