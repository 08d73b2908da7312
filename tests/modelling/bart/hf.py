"""Hugging Face's BART with random weights, as the reference, and our configuration of it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
import transformers

from config.bart import BartConfig
from files.json_files import JsonObject
from modelling.bart.config_json import from_config_json
from tests.modelling.torch_training import ADAMW, Reference, execution, named_by_hf, train

SAMPLES, ENC, DEC, VOCABULARY, STEPS, RATE = 16, 12, 5, 96, 3, 1e-2
START, BOS, PAD, END = 2, 0, 1, 2
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": 32, "max_position_embeddings": 16,
    "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "decoder_layers": 3, "decoder_attention_heads": 2, "decoder_ffn_dim": 40,
    "dropout": 0.0, "forced_bos_token_id": BOS,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "as published": {},
    "scaled, relu": {"scale_embedding": True, "activation_function": "relu", "encoder_layers": 1},
    "forced nowhere": {
        "activation_function": "gelu_new", "forced_bos_token_id": None, "forced_eos_token_id": None,
    },
}  # fmt: skip


@cache
def hf_model(kind: str = "as published", writing: bool = False) -> Any:
    """A small one in float32, without dropout, whose weights all matter.

    Args:
        writing: whether its matrices are so large that it answers different prompts differently.
    """
    torch.manual_seed(0)
    config = transformers.BartConfig(**SIZES | KINDS[kind])
    model = transformers.BartForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.5 if writing and parameter.ndim > 1 else 0.1
            parameter += spread * torch.randn_like(parameter)
        model.final_logits_bias.copy_(0.1 * torch.randn_like(model.final_logits_bias))
    return model.eval()


def without_bias() -> Any:
    """A copy of the first one whose logits have no bias: it is no parameter of torch's."""
    model = copy.deepcopy(hf_model())
    model.final_logits_bias.zero_()
    return model


def weights_of(model: Any) -> dict[str, np.ndarray]:
    """All weights by name, each once, and the buffer."""
    named = dict(model.named_parameters())
    named["final_logits_bias"] = model.final_logits_bias
    return {n: p.detach().numpy().copy() for n, p in named.items()}


def description_of(kind: str) -> dict[str, Any]:
    """The model's config.json, with the token that transformers 5 has in generation_config.json."""
    settings = SIZES | KINDS[kind]
    forced = {"forced_bos_token_id": settings["forced_bos_token_id"]}
    return {**hf_model(kind).config.to_dict(), **forced}


def our_config(
    kind: str = "as published", dp: int = 1, tp: int = 1, micro_batch: int = 4, **model: object
) -> BartConfig:
    """Our configuration of the model that a config.json of `hf_model` describes."""
    read = from_config_json(JsonObject(description_of(kind), "config.json"))
    lengths = {"sequence_length": ENC, "decoder_sequence_length": DEC}
    return BartConfig.from_dict(
        {
            "model": read | lengths | model,
            "training": {"global_batch_size": SAMPLES, "optimizer": ADAMW},
            "execution": execution(dp, tp, micro_batch),
        }
    )


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


def without_keys_biases(named: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """All but what has no gradient: a softmax does not see the biases of keys, and AdamW would make
    steps of rounding."""
    return {name: x for name, x in named.items() if not name.endswith("k_proj.bias")}


@cache
def reference(kind: str = "as published") -> Reference:
    """Reference training in torch, `without_keys_biases`."""
    model = copy.deepcopy(hf_model(kind))

    def loss(batch: Mapping[str, Any]) -> torch.Tensor:
        return model(**named_by_hf(batch)).loss

    found = train(model, batches(), loss, RATE, only=r"^(?!.*k_proj\.bias)")
    return replace(found, weights=without_keys_biases(weights_of(model)))
