"""The sample corpus and its tokenizers, as tests use them."""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast

from data.task import SAMPLE_FOLDER, TASKS
from data.texts import Example
from data.tokens import Tokenizer
from huggingface.hub import load_tokenizer

SEED_DOCUMENT_EXAMPLE = TASKS["mnli"]._example(
    {
        "premise": "Your contribution helped make it possible for us to provide our students with "
        "a quality education.",
        "hypothesis": "Your contributions were of no help with our students' education.",
        "label": 2,
    },
    TASKS["mnli"].prompt,
    TASKS["mnli"].target,
)


def sample_examples(split: str, count: int | None = None, separator: str = "") -> list[Example]:
    """The first examples of a split, each prompt with the separator after it."""
    found = TASKS["sample"].corpus(split).examples[:count]
    return [Example(example.prompt + separator, example.target) for example in found]


def sample_tokenizer(family: str = "t5") -> PreTrainedTokenizerFast:
    return load_tokenizer(str(SAMPLE_FOLDER / f"{family}_tokenizer"))


def run_tokenizer(family: str = "t5") -> Tokenizer:
    return Tokenizer(sample_tokenizer(family))
