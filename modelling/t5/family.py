"""FLAN-T5 as the scripts know it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from config.errors import ConfigError
from config.t5 import T5Config
from data.batches import Samples
from data.generated import generated_examples
from data.pairs import encode, padded_prompts, target_ids
from data.prompts import Prompts
from data.samples import PackedExamples
from data.task import SAMPLE_FOLDER, Example
from files.json_files import Fields
from modelling.spec import Batch, ModelFamily, check_values, labelled_tokens, length_multiple
from modelling.t5.generation import SPECIAL_TOKENS, START_TOKEN, T5Generator
from modelling.t5.streamed import T5Streams
from modelling.t5.training import T5Layout
from modelling.t5.weights import weight_table

TOKENIZERS = {
    "sample": str(SAMPLE_FOLDER / "t5_tokenizer"),
    "mnli": "google/flan-t5-small",  # all sizes of FLAN-T5 have the same tokenizer
}


def complete_tokenizer(config: T5Config, tokenizer: Any) -> Any:
    """The tokenizer, which must have the special tokens of T5."""
    found = tokenizer.pad_token_id, tokenizer.eos_token_id
    if found != (SPECIAL_TOKENS.pad, SPECIAL_TOKENS.end):
        raise ConfigError(
            f"the tokenizer has the padding and end tokens {found[0]} and {found[1]}, but T5's are "
            f"{SPECIAL_TOKENS.pad} and {SPECIAL_TOKENS.end}: give a tokenizer of T5"
        )
    return tokenizer


def encode_samples(config: T5Config, examples: Sequence[Example], tokenizer: Any) -> Samples:
    """Token ids of prompts and targets. Raises ValueError if a target does not fit."""
    model, data = config.model, config.data
    found = encode(
        examples,
        tokenizer,
        model.sequence_length,
        model.decoder_sequence_length,
        data.long_targets,
    )
    return found if data.examples_per_row == 1 else PackedExamples.of(found, data.examples_per_row)


def prompts_of(config: T5Config, texts: Sequence[str], tokenizer: Any) -> tuple[T5Config, Prompts]:
    """Prompts, padded, and a configuration for them.

    They are padded to the longest, or to all of `sequence_length` where several share a sample.
    """
    length = config.model.sequence_length
    multiple = length if config.data.examples_per_row > 1 else length_multiple(config)
    prompts = padded_prompts(texts, tokenizer, length, multiple)
    model = replace(config.model, sequence_length=prompts.words.shape[1])
    return replace(config, model=model), prompts


def generate_samples(config: T5Config, count: int, mean_tokens: float | None) -> Samples:
    """Random samples of the configured lengths.

    Examples that share a sample have equal parts of it, unless their mean length is given.
    """
    model, most = config.model, config.data.examples_per_row
    room = model.sequence_length if mean_tokens else model.sequence_length // most
    found = generated_examples(
        count * most,
        model.embedding.vocab_size,
        room,
        model.decoder_sequence_length,
        model.seed,
        mean_tokens,
    )
    if most == 1:
        return found
    packed = PackedExamples.of(replace(found, sequence_length=model.sequence_length), most)
    chosen = np.linspace(0, len(packed) - 1, count).astype(np.int64)  # full samples come first
    return replace(packed, samples=packed.samples[chosen])


def training_inputs(batch: Batch) -> dict[str, np.ndarray]:
    """Streams of the training program, from a global batch with Hugging Face's names."""
    return {
        "words": batch["input_ids"],
        "mask": batch["attention_mask"],
        "decoder_words": batch["decoder_input_ids"],
        "labels": batch["labels"],
    }


def tokens_of(config: T5Config, batch: Batch) -> int:
    """Tokens of the prompts and the targets, end tokens included."""
    return int(np.count_nonzero(batch["attention_mask"])) + labelled_tokens(batch)


def hf_config(config: T5Config) -> dict[str, Any]:
    """Hugging Face's configuration of the model."""
    model, attention = config.model, config.model.attention
    return {
        "model_type": "t5",
        "architectures": ["T5ForConditionalGeneration"],
        "vocab_size": model.embedding.vocab_size,
        "d_model": model.hidden_size,
        "d_kv": attention.d_kv,
        "d_ff": model.d_ff,
        "num_layers": model.layers,
        "num_decoder_layers": model.layers,
        "num_heads": attention.heads,
        "relative_attention_num_buckets": attention.relative_attention_num_buckets,
        "relative_attention_max_distance": attention.relative_attention_max_distance,
        "layer_norm_epsilon": model.layer_norm_epsilon,
        "dropout_rate": model.dropout_prob,
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
        "decoder_start_token_id": START_TOKEN,
        "pad_token_id": SPECIAL_TOKENS.pad,
        "eos_token_id": SPECIAL_TOKENS.end,
    }


def sizes(description: Fields) -> dict[str, Any]:
    """Fields of the model section for a config.json of T5 v1.1 or FLAN-T5."""
    data, layers = description.data, description.count("num_layers")
    # Whether the head is tied to the embedding is seen from the weights: transformers 5 writes
    # `tie_word_embeddings` true for every T5 that it saves, also where the two differ.
    needed = {
        "feed_forward_proj": ("gated-gelu", "relu"),
        "decoder_start_token_id": (START_TOKEN, START_TOKEN),
        "pad_token_id": (SPECIAL_TOKENS.pad, SPECIAL_TOKENS.pad),
        "eos_token_id": (SPECIAL_TOKENS.end, SPECIAL_TOKENS.end),
        "num_decoder_layers": (layers, layers),
    }
    check_values(data, needed, "T5 v1.1 and FLAN-T5 are known, T5 of 2019 is not")
    return {
        "layers": layers,
        "hidden_size": description.count("d_model"),
        "d_ff": description.count("d_ff"),
        "layer_norm_epsilon": data.get("layer_norm_epsilon", 1e-6),
        "embedding": {"vocab_size": description.count("vocab_size")},
        "attention": {
            "heads": description.count("num_heads"),
            "d_kv": description.count("d_kv"),
            "relative_attention_num_buckets": data.get("relative_attention_num_buckets", 32),
            "relative_attention_max_distance": data.get("relative_attention_max_distance", 128),
        },
    }


FAMILY = ModelFamily(
    layout=T5Layout,
    generator=T5Generator,
    streamed=T5Streams,
    weights=weight_table,
    hf_config=hf_config,
    sizes=sizes,
    tokenizers=TOKENIZERS,
    encode=encode_samples,
    evaluated=encode_samples,
    complete_tokenizer=complete_tokenizer,
    prompts=prompts_of,
    answers=target_ids,
    output_field="decoder_sequence_length",
    tokens=tokens_of,
    generate=generate_samples,
    training_inputs=training_inputs,
)
