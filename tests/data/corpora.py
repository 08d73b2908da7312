"""The sample corpus and its tokenizers, as tests use them."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerFast

from data.causal_lm import TokenStream, one_stream
from data.seq2seq import EncodedExamples, encoded_pairs, fitted_pairs
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


def tokenised(
    examples: Sequence[Example], tokenizer: Tokenizer, answers_only: bool = False
) -> TokenStream:
    """The examples' texts as one stream."""
    texts = list(tokenizer.marked(example.spans() for example in examples))
    return one_stream(texts, answers_only)


def encode(
    examples: Sequence[Example], tokenizer: Tokenizer, *lengths_and_more: object, **more: bool
) -> EncodedExamples:
    """The samples of examples for an encoder-decoder."""
    tokens = list(encoded_pairs(examples, tokenizer))
    return fitted_pairs(tokens, examples, tokenizer, *lengths_and_more, **more)
