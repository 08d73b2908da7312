"""FLAN-T5 as the scripts know it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from config.t5 import T5Config
from data.encoding import IGNORE_INDEX, EncodedExamples, encode
from data.generated import generated_examples
from data.loader import Samples
from data.mnli import Example, encoder_prompt, load_tokenizer
from data.prompts import Prompts
from data.rows import PackedExamples
from modelling.spec import Batch, ModelFamily, length_multiple
from modelling.t5.generation import SPECIAL_TOKENS, START_TOKEN, T5Generator
from modelling.t5.training import T5Layout
from modelling.t5.weights import weight_table


def tokenizer_of(config: T5Config) -> Any:
    """The configured tokenizer."""
    return load_tokenizer(config.data.dataset, config.data.tokenizer, config.family)


def encode_samples(config: T5Config, examples: Sequence[Example], tokenizer: Any) -> Samples:
    """Token ids of the prompts and answers of `examples`. Raises ValueError if an answer is cut."""
    return _in_rows(config, _encoded(config, examples, tokenizer))


def _encoded(config: T5Config, examples: Sequence[Example], tokenizer: Any) -> EncodedExamples:
    """Each by itself."""
    model = config.model
    return encode(examples, tokenizer, model.sequence_length, model.decoder_sequence_length)


def _in_rows(config: T5Config, examples: EncodedExamples) -> Samples:
    """The samples that the examples fill."""
    most = config.data.examples_per_row
    return examples if most == 1 else PackedExamples.of(examples, most)


def validation_prompts(
    config: T5Config, examples: Sequence[Example], tokenizer: Any
) -> tuple[T5Config, Prompts]:
    """Prompts of `examples`, padded, and a configuration for them.

    They are padded to the longest, or to all of `sequence_length` where several share a row. As
    many tokens are generated as the longest right answer has. Raises ValueError if that is more
    than the configuration allows.
    """
    samples = _encoded(config, examples, tokenizer)
    multiple = length_multiple(config)
    length = config.model.sequence_length
    if config.data.examples_per_row == 1:
        longest = math.ceil(np.diff(samples.starts).max() / multiple) * multiple
        length = min(longest, length)
    answer = np.count_nonzero(samples.targets != IGNORE_INDEX, axis=1).max()
    model = replace(config.model, sequence_length=length, decoder_sequence_length=int(answer))
    batch = replace(samples, sequence_length=length).take(np.arange(len(samples)))
    texts = [encoder_prompt(example) for example in examples]
    prompts = Prompts(texts, batch["input_ids"], batch["attention_mask"], samples.truncated)
    return replace(config, model=model), prompts


def generate_samples(config: T5Config, count: int) -> Samples:
    """Random samples of the configured lengths.

    Examples that share a row have equal parts of it, unless their mean length is given.
    """
    model, data, most = config.model, config.data, config.data.examples_per_row
    room = model.sequence_length if data.generated_tokens else model.sequence_length // most
    found = generated_examples(
        count * most,
        model.embedding.vocab_size,
        room,
        model.decoder_sequence_length,
        model.seed,
        data.generated_tokens,
    )
    if most == 1:
        return found
    packed = PackedExamples.of(replace(found, sequence_length=model.sequence_length), most)
    chosen = np.linspace(0, len(packed) - 1, count).astype(np.int64)  # full rows come first
    return replace(packed, rows=packed.rows[chosen])


def training_inputs(batch: Batch) -> dict[str, np.ndarray]:
    """Streams of the training program, from a global batch with Hugging Face's names."""
    return {
        "words": batch["input_ids"],
        "mask": batch["attention_mask"],
        "decoder_words": batch["decoder_input_ids"],
        "labels": batch["labels"],
    }


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


FAMILY = ModelFamily(
    layout=T5Layout,
    generator=T5Generator,
    weights=weight_table,
    hf_config=hf_config,
    tokenizer=tokenizer_of,
    encode=encode_samples,
    prompts=validation_prompts,
    generate=generate_samples,
    training_inputs=training_inputs,
)
