"""GPT-J as the scripts know it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from config.gptj import GPTJConfig
from data.batches import Samples
from data.prompts import Prompts
from data.streams import PackedTokens, answer_ids, pack, pad, prompts_of, with_extra_tokens
from data.task import SAMPLE_FOLDER, Example
from files.json_files import Fields
from modelling.gptj.generation import GPTJGenerator
from modelling.gptj.streamed import GPTJStreams
from modelling.gptj.training import gptj_layout
from modelling.gptj.weights import weight_table
from modelling.spec import Batch, ModelFamily, check_values, length_multiple

TOKENIZERS = {
    "sample": str(SAMPLE_FOLDER / "gptj_tokenizer"),
    "mnli": "EleutherAI/gpt-j-6b",
}


def complete_tokenizer(config: GPTJConfig, tokenizer: Any) -> Any:
    """The tokenizer with a token for each row of the embedding."""
    return with_extra_tokens(tokenizer, config.model.embedding.vocab_size)


def encode_samples(config: GPTJConfig, examples: Sequence[Example], tokenizer: Any) -> Samples:
    """The texts of `examples`, packed or padded as configured."""
    data, encode = config.data, pack if config.data.packing else pad
    return encode(examples, tokenizer, config.model.sequence_length, data.answers_only)


def evaluated_samples(config: GPTJConfig, examples: Sequence[Example], tokenizer: Any) -> Samples:
    """The texts of `examples`, a sample each, of which the targets are predicted."""
    return pad(examples, tokenizer, config.model.sequence_length, answers_only=True)


def validation_prompts(
    config: GPTJConfig, texts: Sequence[str], tokenizer: Any
) -> tuple[GPTJConfig, Prompts]:
    """Prompts, padded to the longest, and a configuration for them."""
    multiple = length_multiple(config)
    prompts = prompts_of(texts, tokenizer, config.model.sequence_length, multiple)
    fitted = replace(
        config.model,
        sequence_length=prompts.words.shape[1],
        end_token=tokenizer.eos_token_id,
        pad_token=tokenizer.pad_token_id,
    )
    return replace(config, model=fitted), prompts


def generate_samples(config: GPTJConfig, count: int, mean_tokens: float | None) -> PackedTokens:
    """Random samples of the configured length, which is that of all: texts are packed."""
    model = config.model
    rng = np.random.default_rng(model.seed)
    length = count * model.sequence_length + 1
    stream = rng.integers(0, model.embedding.vocab_size, length, np.int32)
    return PackedTokens(stream, model.sequence_length)


def training_inputs(batch: Batch) -> dict[str, np.ndarray]:
    """Streams of the training program, from a global batch with Hugging Face's names."""
    return {"words": batch["input_ids"], "labels": batch["labels"]}


def tokens_of(config: GPTJConfig, batch: Batch) -> int:
    """Tokens of the texts."""
    return int(np.count_nonzero(batch["input_ids"] != config.model.pad_token))


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


def sizes(description: Fields) -> dict[str, Any]:
    """Fields of the model section for a config.json of GPT-J."""
    data = description.data
    hidden = description.count("n_embd")
    needed = {
        "activation_function": ("gelu_new", "gelu_new"),
        "tie_word_embeddings": (False, False),
        "n_inner": (4 * hidden if data.get("n_inner") else None, None),
    }
    check_values(data, needed, "such a GPT-J is not known")
    found = {
        "layers": description.count("n_layer"),
        "hidden_size": hidden,
        "layer_norm_epsilon": data.get("layer_norm_epsilon", 1e-5),
        "initializer_range": data.get("initializer_range", 0.02),
        "embedding": {"vocab_size": description.count("vocab_size")},
        "attention": {
            "heads": description.count("n_head"),
            "rotary_dim": description.count("rotary_dim"),
        },
    }
    last = found["embedding"]["vocab_size"] - 1
    end = data.get("eos_token_id")
    found["end_token"] = min(50256, last) if end is None else description.count("eos_token_id")
    pad = data.get("pad_token_id")
    found["pad_token"] = min(50257, last) if pad is None else description.count("pad_token_id")
    return found


FAMILY = ModelFamily(
    layout=gptj_layout,
    generator=GPTJGenerator,
    streamed=GPTJStreams,
    weights=weight_table,
    hf_config=hf_config,
    sizes=sizes,
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
