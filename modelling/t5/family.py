"""FLAN-T5 as the scripts know it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from config.t5 import T5Config
from data.encoding import IGNORE_INDEX, EncodedExamples, encode
from data.generated import GeneratedExamples
from data.loader import Samples
from data.mnli import Example
from data.prompts import Prompts
from modelling.layers.lm_head import IGNORED
from modelling.spec import Batch, ModelFamily
from modelling.t5.generation import T5Generator
from modelling.t5.training import T5Layout
from modelling.t5.weights import weight_table

LENGTH_MULTIPLE = 8
"""Lengths of prompts are rounded up to it, so that fewer different programs are compiled."""


def encode_samples(
    config: T5Config, examples: Sequence[Example], tokenizer: Any
) -> EncodedExamples:
    """Token ids of the prompts and answers of `examples`. Raises ValueError if an answer is cut."""
    model = config.model
    return encode(examples, tokenizer, model.sequence_length, model.decoder_sequence_length)


def validation_prompts(
    config: T5Config, examples: Sequence[Example], tokenizer: Any
) -> tuple[T5Config, Prompts]:
    """Prompts of `examples`, padded to the longest, and a configuration for them.

    As many tokens are generated as the longest right answer has. Raises ValueError if that is more
    than the configuration allows.
    """
    samples = encode_samples(config, examples, tokenizer)
    multiple = math.lcm(LENGTH_MULTIPLE, config.execution.attention_serialisation)
    longest = math.ceil(np.diff(samples.starts).max() / multiple) * multiple
    length = min(longest, config.model.sequence_length)
    answer = np.count_nonzero(samples.targets != IGNORE_INDEX, axis=1).max()
    model = replace(config.model, sequence_length=length, decoder_sequence_length=int(answer))
    batch = replace(samples, sequence_length=length).take(np.arange(len(samples)))
    prompts = Prompts(batch["input_ids"], batch["attention_mask"], samples.truncated)
    return replace(config, model=model), prompts


def generate_samples(config: T5Config, count: int) -> Samples:
    """Random samples of the configured lengths."""
    model = config.model
    return GeneratedExamples(
        count,
        model.embedding.vocab_size,
        model.sequence_length,
        model.decoder_sequence_length,
        model.seed,
    )


def training_inputs(batch: Batch) -> dict[str, np.ndarray]:
    """Streams of the training program, from a global batch with Hugging Face's names."""
    return {
        "words": batch["input_ids"],
        "mask": batch["attention_mask"],
        "decoder_words": batch["decoder_input_ids"],
        "labels": batch["labels"],
    }


def target_tokens(batch: Batch) -> int:
    """Tokens that the loss is the mean of: all targets of the global batch, `</s>` included."""
    return int(np.count_nonzero(batch["labels"] != IGNORED))


FAMILY = ModelFamily(
    layout=T5Layout,
    generator=T5Generator,
    weights=weight_table,
    encode=encode_samples,
    prompts=validation_prompts,
    generate=generate_samples,
    training_inputs=training_inputs,
    target_tokens=target_tokens,
)
