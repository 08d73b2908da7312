"""GPT-J as the scripts know it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from config.gptj import GPTJConfig
from data.causal import PackedTokens, longest_answer, pack, pad, prompts_of, with_extra_tokens
from data.loader import Samples
from data.mnli import Example, load_tokenizer
from data.prompts import Prompts
from modelling.gptj.generation import GPTJGenerator
from modelling.gptj.training import gptj_layout
from modelling.gptj.weights import weight_table
from modelling.spec import Batch, ModelFamily, length_multiple


def tokenizer_of(config: GPTJConfig) -> Any:
    """The configured tokenizer, with a token for each row of the embedding."""
    tokenizer = load_tokenizer(config.data.dataset, config.data.tokenizer, config.family)
    return with_extra_tokens(tokenizer, config.model.embedding.vocab_size)


def encode_samples(config: GPTJConfig, examples: Sequence[Example], tokenizer: Any) -> Samples:
    """The texts of `examples`, packed or padded as configured."""
    data, encode = config.data, pack if config.data.packing else pad
    return encode(examples, tokenizer, config.model.sequence_length, data.answers_only)


def validation_prompts(
    config: GPTJConfig, examples: Sequence[Example], tokenizer: Any
) -> tuple[GPTJConfig, Prompts]:
    """Prompts of `examples`, padded to the longest, and a configuration for them.

    Raises:
        ValueError: the right answers have more tokens than are generated.
    """
    model, answer = config.model, longest_answer(tokenizer)
    if answer > model.output_length:
        raise ValueError(
            f"the longest answer has {answer} tokens with {tokenizer.eos_token}, but "
            f"output_length is {model.output_length}: set it to {answer} or more"
        )
    multiple = length_multiple(config)
    prompts = prompts_of(examples, tokenizer, model.sequence_length, multiple)
    fitted = replace(
        model,
        sequence_length=prompts.words.shape[1],
        end_token=tokenizer.eos_token_id,
        pad_token=tokenizer.pad_token_id,
    )
    return replace(config, model=fitted), prompts


def generate_samples(config: GPTJConfig, count: int) -> PackedTokens:
    """Random samples of the configured length."""
    model = config.model
    rng = np.random.default_rng(model.seed)
    length = count * model.sequence_length + 1
    stream = rng.integers(0, model.embedding.vocab_size, length, np.int32)
    return PackedTokens(stream, model.sequence_length)


def training_inputs(batch: Batch) -> dict[str, np.ndarray]:
    """Streams of the training program, from a global batch with Hugging Face's names."""
    return {"words": batch["input_ids"], "labels": batch["labels"]}


def hf_config(config: GPTJConfig) -> dict[str, Any]:
    """Hugging Face's configuration of the model."""
    model = config.model
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), model.dropout_prob)
    return {
        "model_type": "gptj",
        "architectures": ["GPTJForCausalLM"],
        "vocab_size": model.embedding.vocab_size,
        "n_positions": max(model.sequence_length + model.output_length, 2048),
        "n_embd": model.hidden_size,
        "n_layer": model.layers,
        "n_head": model.attention.heads,
        "rotary_dim": model.attention.rotary_dim,
        "layer_norm_epsilon": model.layer_norm_epsilon,
        "initializer_range": model.initializer_range,
        "activation_function": "gelu_new",
        "tie_word_embeddings": False,
        "bos_token_id": model.end_token,
        "pad_token_id": model.pad_token,
        "eos_token_id": model.end_token,
        **dropout,
    }


FAMILY = ModelFamily(
    layout=gptj_layout,
    generator=GPTJGenerator,
    weights=weight_table,
    hf_config=hf_config,
    tokenizer=tokenizer_of,
    encode=encode_samples,
    prompts=validation_prompts,
    generate=generate_samples,
    training_inputs=training_inputs,
)
