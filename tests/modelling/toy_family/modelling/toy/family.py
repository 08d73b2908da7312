"""The toy family as the scripts know it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from config.toy import ToyConfig
from data.prompts import Prompts
from data.streams import PackedTokens, PaddedTexts, answer_ids, pad, prompts_of
from data.task import SAMPLE_FOLDER, Example
from modelling.spec import Batch, ModelFamily
from modelling.toy.generation import ToyGenerator
from modelling.toy.training import toy_layout
from modelling.toy.weights import weight_table


def encode_samples(config: ToyConfig, examples: Sequence[Example], tokenizer: Any) -> PaddedTexts:
    return pad(examples, tokenizer, config.model.sequence_length)


def evaluated(config: ToyConfig, examples: Sequence[Example], tokenizer: Any) -> PaddedTexts:
    return pad(examples, tokenizer, config.model.sequence_length, answers_only=True)


def validation_prompts(
    config: ToyConfig, texts: Sequence[str], tokenizer: Any
) -> tuple[ToyConfig, Prompts]:
    prompts = prompts_of(texts, tokenizer, config.model.sequence_length, 1)
    model = replace(config.model, sequence_length=prompts.words.shape[1])
    return replace(config, model=model), prompts


def generate_samples(config: ToyConfig, count: int, mean_tokens: float | None) -> PackedTokens:
    length = config.model.sequence_length
    return PackedTokens(np.zeros(count * length + 1, np.int32), length)


def training_inputs(batch: Batch) -> dict[str, np.ndarray]:
    return {"words": batch["input_ids"], "labels": batch["labels"]}


FAMILY = ModelFamily(
    layout=toy_layout,
    generator=ToyGenerator,
    weights=weight_table,
    hf_config=lambda config: {"model_type": "toy"},
    sizes=lambda description: {},
    tokenizers={"sample": str(SAMPLE_FOLDER / "gptj_tokenizer")},
    encode=encode_samples,
    evaluated=evaluated,
    prompts=validation_prompts,
    answers=answer_ids,
    output_field="output_length",
    generate=generate_samples,
    training_inputs=training_inputs,
)
