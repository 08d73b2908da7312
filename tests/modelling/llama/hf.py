"""Hugging Face's Llama-shaped models, small, random and of every architecture, as the reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import transformers

from config.llama import LlamaConfig
from files.json_files import JsonObject
from modelling.llama.config_json import ARCHITECTURES, MIXTURES, from_config_json
from modelling.weights import WeightMap
from tests.modelling.torch_training import ADAMW, execution

VOCABULARY, END, PAD = 61, 1, 2  # tensor parallelism pads the last shard
LENGTH = 12

SETTINGS: dict[str, dict[str, Any]] = {
    "llama": {
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 40,
        },
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8,
        "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True,
        "eos_token_id": [9, END, 21],
    },
    "mistral": {"sliding_window": 5, "head_dim": 6},
    "qwen2": {
        "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    },
    "qwen3": {
        "head_dim": 12, "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        "max_position_embeddings": 8,
    },
    "phi3": {
        "sliding_window": 7, "partial_rotary_factor": 0.5, "max_position_embeddings": 64,
        "original_max_position_embeddings": 8, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.1, 1.3],
            "long_factor": [2.0, 5.0],
        },
    },
    "gemma2": {
        "sliding_window": 5, "query_pre_attn_scalar": 20, "head_dim": 6,
        "attn_logit_softcapping": 4.0, "final_logit_softcapping": 3.0, "eos_token_id": [END, 7],
    },
    "gemma3_text": {
        "sliding_window": 5, "query_pre_attn_scalar": 20, "head_dim": 6,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 3.0},
        },
    },
    "smollm3": {"no_rope_layers": [1, 0, 1], "tie_word_embeddings": True},
    "olmo2": {"num_key_value_heads": 2},
    "granite": {
        "embedding_multiplier": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.6,
        "logits_scaling": 2.5, "tie_word_embeddings": True,
    },
    "ministral3": {
        "head_dim": 8, "max_position_embeddings": 64,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "mscale": 1.0,
            "original_max_position_embeddings": 3, "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.4,
        },
    },
    "olmo3": {
        "sliding_window": 5, "num_hidden_layers": 4,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
            "full_attention": {
                "rope_type": "yarn", "rope_theta": 500000.0, "factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
    },
    "mixtral": {"sliding_window": 6, "num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 6, "num_experts_per_tok": 4, "moe_intermediate_size": 16, "qkv_bias": True,
        "shared_expert_intermediate_size": 20, "norm_topk_prob": False,
        "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2,
    },
    "qwen3_moe": {
        "head_dim": 12, "num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True,
        "moe_intermediate_size": 12, "tie_word_embeddings": True,
    },
    "olmoe": {"num_experts": 7, "num_experts_per_tok": 3, "norm_topk_prob": False},
    "gpt_oss": {
        "num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 8, "sliding_window": 4,
        "swiglu_limit": 0.5, "swiglu_alpha": 1.5,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "truncate": False,
            "original_max_position_embeddings": 40,
        },
    },
}  # fmt: skip
"""For each architecture something of all that it can do."""

BIASED = {"architecture": "llama", "attention_bias": True, "mlp_bias": True}


def hf_config(kind: str, **settings: Any) -> Any:
    """transformers' configuration of a small model."""
    found: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "bos_token_id": None,
        "eos_token_id": END,
        "pad_token_id": PAD,
        "attention_dropout": 0.0,
    }
    cls = transformers.CONFIG_MAPPING[kind]
    return cls(**{**found, **SETTINGS[kind], **settings}, **implementations(kind))


def implementations(kind: str) -> dict[str, str]:
    """Plain code for what transformers has kernels for."""
    experts = {"experts_implementation": "eager"} if kind in MIXTURES else {}
    return {"attn_implementation": "eager", **experts}


def our_config(
    hf_cfg: Any, dp: int = 1, tp: int = 1, micro_batch: int = 4, slices: int = 1, **model: Any
) -> LlamaConfig:
    """Our configuration of the model of a config.json: global batch 8, everything sharded."""
    read = from_config_json(JsonObject(hf_cfg.to_dict(), "config.json"))
    optimizer = ADAMW | {"learning_rate": {"function": "constant"}}
    return LlamaConfig.from_dict(
        {
            "family": "llama",
            "model": read | {"sequence_length": LENGTH, "output_length": 5} | model,
            "training": {"global_batch_size": 8, "optimizer": optimizer},
            "execution": execution(dp, tp, micro_batch, slices),
            "data": {"dataset": "sample"},
        }
    )


def hf_model(hf_cfg: Any, seed: int = 0) -> Any:
    """The configured model in float32, with weights that all matter."""
    torch.manual_seed(seed)
    model = getattr(transformers, ARCHITECTURES[hf_cfg.model_type].cls)(hf_cfg).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms are not 1, biases not 0
            parameter += 0.15 * torch.randn_like(parameter)
    return model


def weights_of(model: Any) -> dict[str, np.ndarray]:
    """Its weights by name, as its files would have them."""
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    found = {n: p.detach().numpy().copy() for n, p in model.named_parameters()}
    return {n: x for n, x in found.items() if n not in tied}


def as_parameters(
    weight_map: WeightMap, weights: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Weights as transformers' modules have them, which stack those of experts."""
    found = dict(weight_map.to_hf(weights))
    for name, stacked in weight_map.hf_names.fused.items():
        if name not in found and stacked.stack_axis == 0:
            groups = [[found.pop(n) for n in names] for names in stacked.groups]
            found[name] = np.stack([np.concatenate(parts) for parts in groups])
    routers = {own: alias for alias, own in weight_map.hf_names.aliases.items() if "gate" in alias}
    return {routers.get(name, name): x for name, x in found.items()}
