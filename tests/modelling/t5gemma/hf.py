"""Hugging Face's T5Gemma 1 and 2 with random weights, the reference, and our configuration."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
import transformers

from config.t5gemma import T5GemmaConfig
from data.packing import EMPTY_SLOT
from data.seq2seq import EncodedExamples, PackedExamples
from files.json_files import JsonObject
from modelling.t5gemma.config_json import from_config_json
from tests.modelling.torch_training import ADAMW, Reference, execution, named_by_hf, train

SAMPLES, ROWS, PLACES, ENC, DEC, VOCABULARY, STEPS, RATE = 16, 12, 3, 12, 6, 97, 3, 3e-3
START, PAD, ENDS = 2, 0, [1, *range(80, 90)]

SLIDING, FULL = "sliding_attention", "full_attention"
STACK: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "query_pre_attn_scalar": 16,
    "sliding_window": 3, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 7.0,
    "max_position_embeddings": 64, "layer_types": [SLIDING, FULL, SLIDING],
}  # fmt: skip
WIDE: dict[str, Any] = {
    "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 6,
    "num_hidden_layers": 2, "layer_types": [SLIDING, FULL],
}  # fmt: skip
KINDS: dict[str, Any] = {
    "as published": ({}, {}, {}),
    "wide encoder": (WIDE, {}, {}),
    "untied, no caps": (
        {"attn_logit_softcapping": None},
        {"attn_logit_softcapping": None, "final_logit_softcapping": None, "sliding_window": 2},
        {"tie_word_embeddings": False},
    ),
}
"""Changes of the encoder, of the decoder, and of the whole, by name."""

MERGED_STACK: dict[str, Any] = STACK | {
    "attn_logit_softcapping": None, "final_logit_softcapping": None,
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 100.0},
        FULL: {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    },
}  # fmt: skip
MERGED_KINDS: dict[str, Any] = {
    "t5gemma2": ({}, {}, {}),
    "t5gemma2, other sizes": (
        {"sliding_window": 4, "num_attention_heads": 2, "head_dim": 16},
        {
            "num_hidden_layers": 2, "layer_types": [FULL, SLIDING], "num_key_value_heads": 4,
            "sliding_window": 2, "final_logit_softcapping": 7.0,
        },
        {},
    ),
}  # fmt: skip
"""The same of T5Gemma 2."""
VISION: dict[str, Any] = {
    "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 16, "patch_size": 8, "model_type": "siglip_vision_model",
}  # fmt: skip
EOI, IMAGES = 77, "vision_tower|multi_modal_projector"
ALL_KINDS = [*KINDS, *MERGED_KINDS]


def drawn(seed: int, merged: bool = False) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Changes that a random generator chooses, as in `KINDS`."""
    rng = random.Random(seed)

    def stack() -> dict[str, Any]:
        layers = rng.randint(1, 4)
        return {
            "hidden_size": rng.choice([24, 32, 40]), "intermediate_size": rng.choice([16, 48]),
            "num_hidden_layers": layers, "num_attention_heads": rng.choice([2, 4]),
            "num_key_value_heads": rng.choice([1, 2]), "head_dim": rng.choice([6, 8, 16]),
            "layer_types": [rng.choice([SLIDING, FULL]) for _ in range(layers)],
            "sliding_window": rng.randint(1, 7), "query_pre_attn_scalar": rng.choice([8, 20]),
            "attn_logit_softcapping": rng.choice([None, 3.0]),
            "final_logit_softcapping": rng.choice([None, 5.0]),
            "hidden_activation": rng.choice(["gelu_pytorch_tanh", "silu"]),
            "rms_norm_eps": rng.choice([1e-6, 1e-3]),
            "rope_parameters": {"rope_type": "default", "rope_theta": rng.choice([1e2, 1e4])},
        }  # fmt: skip

    encoder, decoder = stack(), stack()
    # Where a token reads itself alone, queries and keys have no gradient but rounding.
    one = encoder if merged else decoder
    one["sliding_window"] = max(2, one["sliding_window"])
    if not merged:
        return encoder, decoder, {"tie_word_embeddings": rng.random() < 0.7}
    for one in (encoder, decoder):
        bases = {name: rng.choice([1e2, 1e4]) for name in (SLIDING, FULL)}
        one |= {"attn_logit_softcapping": None, "hidden_size": encoder["hidden_size"]}
        one["rope_parameters"] = {
            name: {"rope_type": "default", "rope_theta": base} for name, base in bases.items()
        }
    return encoder, decoder, {}


def is_merged(kind: str) -> bool:
    """Whether a kind is T5Gemma 2's."""
    return kind.startswith("t5gemma2")


def hf_config(kind: str) -> Any:
    """The configuration of a kind, or of a number that is drawn from, such as 3 or t5gemma2 3."""
    known, seed = KINDS | MERGED_KINDS, kind.rpartition(" ")[2]
    found = known[kind] if kind in known else drawn(int(seed), is_merged(kind))
    encoder, decoder, whole = found
    if not is_merged(kind):
        return transformers.T5GemmaConfig(encoder=STACK | encoder, decoder=STACK | decoder, **whole)
    images = {"vision_config": VISION, "mm_tokens_per_image": 4, "eoi_token_index": EOI}
    return transformers.T5Gemma2Config(
        encoder={"text_config": MERGED_STACK | encoder, **images, "image_token_index": 95},
        decoder=MERGED_STACK | decoder,
        image_token_index=95,
    )


@cache
def hf_model(kind: str = "as published", writing: bool = False) -> Any:
    """A small one in float32, without dropout, whose weights all matter.

    Its attention is "eager", the only one that applies soft caps.

    Args:
        writing: whether layers add so much that it answers different prompts differently.
    """
    torch.manual_seed(0)
    config = hf_config(kind)
    number = 2 if is_merged(kind) else ""
    cls = getattr(transformers, f"T5Gemma{number}ForConditionalGeneration")
    model = cls._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_matrix = parameter.ndim > 1 and "embed" not in name
            parameter += (0.4 if writing and is_matrix else 0.1) * torch.randn_like(parameter)
            parameter += float(writing and "post_" in name)
    return model.eval()


def weights_of(model: Any) -> dict[str, np.ndarray]:
    """All weights but those for images by name, each once."""
    named = {n: p.detach().numpy().copy() for n, p in model.named_parameters()}
    return {n: x for n, x in named.items() if not re.search(IMAGES, n)}


def our_config(
    kind: str = "as published", dp: int = 1, tp: int = 1, micro_batch: int = 4, **model: object
) -> T5GemmaConfig:
    """Our configuration of the model that a config.json of `hf_model` describes."""
    read = from_config_json(JsonObject(hf_model(kind).config.to_dict(), "config.json"))
    lengths = {"sequence_length": ENC, "decoder_sequence_length": DEC}
    return T5GemmaConfig.from_dict(
        {
            "model": read | lengths | model,
            "training": {"global_batch_size": SAMPLES, "optimizer": ADAMW},
            "execution": execution(dp, tp, micro_batch),
        }
    )


def packed_config(config: T5GemmaConfig, **settings: object) -> T5GemmaConfig:
    """A configuration whose samples have several examples."""
    data = config.to_dict()
    data["training"]["global_batch_size"] = ROWS
    data["execution"] |= settings
    data["data"]["examples_per_sample"] = PLACES
    return T5GemmaConfig.from_dict(data)


def batches(count: int = STEPS) -> list[dict[str, np.ndarray]]:
    """Global batches with lengths from 2 to the maximum, padded right; labels padded with -100."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(count):
        mask = (np.arange(ENC) < rng.integers(2, ENC + 1, (SAMPLES, 1))).astype(np.int32)
        input_ids = np.where(mask, rng.integers(3, VOCABULARY, mask.shape), PAD).astype(np.int32)
        labels = rng.integers(3, VOCABULARY, (SAMPLES, DEC)).astype(np.int32)
        labels[np.arange(DEC) >= rng.integers(1, DEC + 1, (SAMPLES, 1))] = -100
        read = np.concatenate([np.full((SAMPLES, 1), START), labels[:, :-1]], axis=1)
        read = np.where(read == -100, PAD, read).astype(np.int32)
        found.append(
            {
                "input_ids": input_ids,
                "segment_ids": mask,
                "decoder_input_ids": read,
                "labels": labels,
            }
        )
    return found


def packed(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The examples of a batch, at most `PLACES` in a row, and empty rows up to `ROWS`."""
    lengths = batch["segment_ids"].sum(axis=1)
    tokens = np.concatenate([w[:n] for w, n in zip(batch["input_ids"], lengths, strict=True)])
    starts = np.cumsum([0, *lengths])
    examples = EncodedExamples(tokens, starts, batch["labels"], ENC, PAD, start=START)
    samples = PackedExamples.from_examples(examples, PLACES)
    assert SAMPLES > ROWS > len(samples)
    missing = np.full((ROWS - len(samples), PLACES), EMPTY_SLOT)
    return replace(samples, samples=np.concatenate([samples.samples, missing])).take(range(ROWS))


@cache
def reference(kind: str = "as published") -> Reference:
    """Reference training in torch."""

    def loss(batch: Mapping[str, Any]) -> torch.Tensor:
        found: torch.Tensor = model(**named_by_hf(batch)).loss
        return found

    model = copy.deepcopy(hf_model(kind))
    found = train(model, batches(), loss, RATE, only=f"^(?!.*({IMAGES}))")
    return replace(found, weights=weights_of(model))
