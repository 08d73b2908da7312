"""FLAN-T5 as the scripts know it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from config.t5 import T5Config
from data.encoding import encode
from data.generated import GeneratedExamples
from data.loader import Samples
from data.mnli import Example

from modelling.layers.lm_head import IGNORED
from modelling.spec import Batch, ModelFamily
from modelling.t5.generation import T5Generator
from modelling.t5.training import T5Layout
from modelling.t5.weights import weight_table


def encode_samples(config: T5Config, examples: Sequence[Example], tokenizer: Any) -> Samples:
    """Token ids of the prompts and answers of `examples`. Raises ValueError if an answer is cut."""
    model = config.model
    return encode(examples, tokenizer, model.sequence_length, model.decoder_sequence_length)


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
    generate=generate_samples,
    training_inputs=training_inputs,
    target_tokens=target_tokens,
)
