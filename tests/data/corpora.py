"""The sample corpus and its tokenizers, as tests use them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from data.causal_lm import TokenStream, concatenate_to_stream
from data.class_labels import ClassLabels
from data.examples import Example
from data.row_formats import PromptTarget
from data.seq2seq import EncodedExamples, encode_examples, truncate_examples
from data.sources import FileSource
from data.task import NLI_LABELS, SAMPLE_FOLDER, TASKS
from data.tokenizer import Tokenizer
from huggingface.hub import load_tokenizer

SEED_DOCUMENT_EXAMPLE = TASKS["mnli"]._convert_text_row(
    {
        "premise": "Your contribution helped make it possible for us to provide our students with "
        "a quality education.",
        "hypothesis": "Your contributions were of no help with our students' education.",
        "label": 2,
    },
    PromptTarget(TASKS["mnli"].prompt, TASKS["mnli"].target),
    ClassLabels(NLI_LABELS),
)


def sample_examples(split: str, count: int | None = None, separator: str = "") -> list[Example]:
    """The first examples of a split, each prompt with the separator after it."""
    task = TASKS["sample"]
    source = task.source_of_split(split)
    found = task.convert_rows(islice(source.read_rows(), count), task.row_schema(source), None)
    return [Example(example.prompt + separator, example.target) for _, example in found]


def few_rows(patch: pytest.MonkeyPatch, folder: Path, **rows: int) -> None:
    """Let each split of the sample corpus have so many rows, from files in a folder."""
    sources = {}
    for split, count in rows.items():
        lines = (SAMPLE_FOLDER / f"{split}.jsonl").read_text("utf-8").splitlines(keepends=True)
        (folder / f"{split}.jsonl").write_text("".join(lines[:count]), "utf-8")
        sources[split] = FileSource(str(folder / f"{split}.jsonl"))
    patch.setitem(TASKS, "sample", replace(TASKS["sample"], sources=sources))


def sample_tokenizer(family: str = "t5") -> PreTrainedTokenizerFast:
    return load_tokenizer(str(SAMPLE_FOLDER / f"{family}_tokenizer"))


def run_tokenizer(family: str = "t5") -> Tokenizer:
    return Tokenizer(sample_tokenizer(family))


def token_stream(
    examples: Sequence[Example], tokenizer: Tokenizer, answers_only: bool = False
) -> TokenStream:
    """The examples' texts as one stream."""
    texts = list(tokenizer.encode_with_loss_mask(example.text_spans() for example in examples))
    return concatenate_to_stream(texts, answers_only)


def encode(
    examples: Sequence[Example], tokenizer: Tokenizer, *lengths_and_more: object, **more: bool
) -> EncodedExamples:
    """The samples of examples for an encoder-decoder."""
    tokens = list(encode_examples(examples, tokenizer))
    return truncate_examples(tokens, examples, tokenizer, *lengths_and_more, **more)
