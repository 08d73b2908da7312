"""Llama-shaped models as the scripts know them."""

from __future__ import annotations

from typing import Any

from data.streams import answer_ids
from data.task import SAMPLE_FOLDER
from modelling.gptj.family import (
    encode_samples,
    evaluated_samples,
    generate_samples,
    tokens_of,
    training_inputs,
    validation_prompts,
)
from modelling.llama.description import hf_config, same_form, sizes
from modelling.llama.generation import LlamaGenerator
from modelling.llama.training import llama_layout
from modelling.llama.weights import weight_table
from modelling.spec import ModelFamily

TOKENIZERS = {
    "sample": str(SAMPLE_FOLDER / "gptj_tokenizer"),
    "mnli": "Qwen/Qwen3-0.6B",
}


def complete_tokenizer(config: Any, tokenizer: Any) -> Any:
    """The tokenizer, with the end token for padding where it has none."""
    hf_config(config)  # said before a run that there is no such model of its architecture
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


FAMILY = ModelFamily(
    layout=llama_layout,
    generator=LlamaGenerator,
    weights=weight_table,
    hf_config=hf_config,
    sizes=sizes,
    same_form=same_form,
    tokenizers=TOKENIZERS,
    complete_tokenizer=complete_tokenizer,
    encode=encode_samples,
    evaluated=evaluated_samples,
    prompts=validation_prompts,
    answers=answer_ids,
    output_field="output_length",
    tokens=tokens_of,
    separator=lambda config: config.data.separator,
    generate=generate_samples,
    training_inputs=training_inputs,
)
