"""Hugging Face's BART and relatives with random weights, as the reference, and ours."""

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
from data.seq2seq import shift_right
from files.json_files import JsonObject
from modelling.bart.config_json import from_config_json
from tests.modelling.torch_training import ADAMW, Reference, execution, named_by_hf, train

SAMPLES, ENC, DEC, VOCABULARY, STEPS, RATE = 16, 12, 5, 97, 3, 1e-2
START, BOS, PAD, END = 2, 0, 1, 2
SIZES: dict[str, Any] = {
    "model_type": "bart", "vocab_size": VOCABULARY, "d_model": 32, "max_position_embeddings": 16,
    "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "decoder_layers": 3, "decoder_attention_heads": 2, "decoder_ffn_dim": 40,
    "dropout": 0.0, "attention_dropout": 0.0, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0,
    "pad_token_id": PAD, "eos_token_id": END, "bos_token_id": BOS,
    "decoder_start_token_id": START, "forced_bos_token_id": BOS, "forced_eos_token_id": END,
}  # fmt: skip
_RELU = {"scale_embedding": True, "activation_function": "relu"}
KINDS: dict[str, dict[str, Any]] = {
    "as published": {},
    "scaled, relu": {**_RELU, "encoder_layers": 1},
    "forced nowhere": {
        "activation_function": "gelu_new", "forced_bos_token_id": None, "forced_eos_token_id": None,
    },
    "mbart": {"model_type": "mbart", **_RELU, "forced_bos_token_id": 7},
    "m2m_100": {
        "model_type": "m2m_100", **_RELU, "forced_bos_token_id": 9, "forced_eos_token_id": None,
    },
    "marian": {
        "model_type": "marian", "activation_function": "swish", "scale_embedding": True,
        "decoder_start_token_id": PAD, "bos_token_id": None, "forced_bos_token_id": None,
    },
    "two vocabularies": {
        "model_type": "marian", "decoder_vocab_size": 77, "decoder_start_token_id": PAD,
        "share_encoder_decoder_embeddings": False, "forced_bos_token_id": None,
    },
    "pegasus": {"model_type": "pegasus", **_RELU, "decoder_start_token_id": PAD},
}  # fmt: skip


def draw(seed: int) -> dict[str, Any]:
    """Draws a model's settings; of six seeds in a row each type has one, Marian two."""
    rng = np.random.default_rng([63, seed])
    kind = ("bart", "mbart", "m2m_100", "marian", "pegasus", "two vocabularies")[seed % 6]
    stacks = {
        f"{stack}_{name}": int(rng.choice(values))
        for stack in ("encoder", "decoder")
        for name, values in (
            ("layers", [1, 2, 3]), ("attention_heads", [2, 4, 8]), ("ffn_dim", [20, 48]),
        )
    }  # fmt: skip
    return {
        **KINDS.get(kind, {}), **stacks, "d_model": int(rng.choice([16, 32, 48])),
        "activation_function": str(rng.choice(["gelu", "gelu_new", "relu", "swish"])),
        "scale_embedding": bool(rng.integers(2)),
        "decoder_start_token_id": START if kind == "m2m_100" else int(rng.choice([START, PAD])),
        "forced_bos_token_id": (None, 11)[rng.integers(2)],
        "forced_eos_token_id": (None, END)[rng.integers(2)],
    }  # fmt: skip


NUM_DRAWN = 30
DRAWN = {f"drawn {seed}": draw(seed) for seed in range(NUM_DRAWN)}


def settings_of(kind: str) -> dict[str, Any]:
    """A model's config.json, but for what transformers' classes say."""
    return SIZES | (KINDS | DRAWN)[kind]


@cache
def hf_model(kind: str = "as published", writing: bool = False) -> Any:
    """A small one in float32, without dropout, whose weights all matter.

    Args:
        writing: whether its matrices are so large that it answers different prompts differently.
    """
    torch.manual_seed(0)
    settings = settings_of(kind)
    config = transformers.CONFIG_MAPPING[settings["model_type"]](**settings)
    model = transformers.AutoModelForSeq2SeqLM.from_config(config)
    with torch.no_grad():
        # transformers does not save Marian's positions.
        saves = settings["model_type"] == "pegasus"
        for parameter in (p for p in model.parameters() if p.requires_grad or saves):
            spread = 0.5 if writing and parameter.ndim > 1 else 0.1
            parameter += spread * torch.randn_like(parameter)
        for bias in buffers_of(model).values():
            bias.copy_(0.1 * torch.randn_like(bias))
    return model.eval()


def buffers_of(model: Any) -> dict[str, torch.Tensor]:
    """The bias of the logits by name, if the model has one."""
    return {n: x for n, x in model.named_buffers() if n == "final_logits_bias"}


def without_bias(kind: str = "as published") -> Any:
    """A copy of a model whose logits have no bias: it is no parameter of torch's."""
    model = copy.deepcopy(hf_model(kind))
    for bias in buffers_of(model).values():
        bias.zero_()
    return model


def weights_of(model: Any) -> dict[str, np.ndarray]:
    """All weights by name, each once, and the buffer."""
    named = dict(model.named_parameters()) | buffers_of(model)
    return {n: p.detach().numpy().copy() for n, p in named.items()}


def description_of(kind: str) -> dict[str, Any]:
    """The model's config.json, with tokens that transformers 5 has in generation_config.json."""
    settings = settings_of(kind)
    forced = {n: settings[n] for n in ("forced_bos_token_id", "forced_eos_token_id")}
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


def batches(count: int = STEPS, kind: str = "as published") -> list[dict[str, np.ndarray]]:
    """Global batches with lengths from 2 to the maximum, padded right; labels padded with -100."""
    model = our_config(kind).model
    rng = np.random.default_rng(0)
    found = []
    for _ in range(count):
        mask = (np.arange(ENC) < rng.integers(2, ENC + 1, (SAMPLES, 1))).astype(np.int32)
        input_ids = np.where(mask, rng.integers(3, VOCABULARY, mask.shape), PAD).astype(np.int32)
        labels = rng.integers(3, model.output_vocab_size, (SAMPLES, DEC)).astype(np.int32)
        labels[np.arange(DEC) >= rng.integers(1, DEC + 1, (SAMPLES, 1))] = -100
        found.append(
            {
                "input_ids": input_ids,
                "segment_ids": mask,
                "decoder_input_ids": shift_right(labels, PAD, model.training_start_token),
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
    """Reference training in torch, `without_keys_biases`; it makes the decoder's inputs itself."""
    model = copy.deepcopy(hf_model(kind))

    def loss(batch: Mapping[str, Any]) -> torch.Tensor:
        given = {n: x for n, x in named_by_hf(batch).items() if n != "decoder_input_ids"}
        return model(**given).loss

    found = train(model, batches(kind=kind), loss, RATE, only=r"^(?!.*k_proj\.bias)")
    return replace(found, weights=without_keys_biases(weights_of(model)))
