"""Random small models of every architecture, each with a random way to run it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import transformers

from modelling.config_json import hf_defaults
from modelling.llama.config_json import ARCHITECTURES, MIXTURES
from tests.modelling.llama.hf import END, LENGTH, PAD, SETTINGS, VOCABULARY, implementations

LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4)]
HIDDEN, INNER = 32, 24


@dataclass(frozen=True)
class RandomConfig:
    """A model and a way to run it.

    Attributes:
        hf_cfg: transformers' configuration.
        dp, tp, micro_batch, slices, transposed, activations: how we train it.
        texts: whether several texts share a sample, where angles do not depend on lengths.
        streamed: whether it writes layer by layer.
    """

    hf_cfg: Any
    dp: int
    tp: int
    micro_batch: int
    slices: int
    transposed: bool
    activations: str
    texts: bool
    streamed: bool


DENSE = tuple(kind for kind in SETTINGS if kind not in MIXTURES)


def random_config(seed: int, kinds: Sequence[str] = DENSE) -> RandomConfig:
    """The draw of a seed; as many seeds in a row as there are kinds have all architectures."""
    rng = np.random.default_rng([24, seed])
    kind = kinds[seed % len(kinds)]
    settings = _settings(kind, rng)
    dp, tp = LAYOUTS[rng.integers(len(LAYOUTS))]
    tp = min(tp, settings["num_attention_heads"])
    hf_cfg = transformers.CONFIG_MAPPING[kind](**settings, **implementations(kind))
    rope = settings["rope_parameters"]
    return RandomConfig(
        hf_cfg, dp, tp,
        micro_batch=int(rng.choice([1, 2, 4])),
        slices=int(rng.choice([1, 1, 2, 3])),
        transposed=bool(rng.integers(2)),
        activations=str(rng.choice(["keep", "recompute"])),
        texts=rope.get("full_attention", rope)["rope_type"] != "dynamic",
        streamed=bool(rng.integers(2)),
    )  # fmt: skip


def _settings(kind: str, rng: np.random.Generator) -> dict[str, Any]:
    known, _ = hf_defaults(kind)
    heads = int(rng.choice([2, 4, 8]))
    groups = int(rng.choice([n for n in (1, 2, 4, 8) if n <= heads]))
    layers = int(rng.integers(1, 5))
    size = 2 * int(rng.integers(2, 7)) if "head_dim" in known else HIDDEN // heads
    maybe = {
        "head_dim": size,
        "attention_bias": bool(rng.integers(2)),
        "mlp_bias": bool(rng.integers(2)),
        "tie_word_embeddings": bool(rng.integers(2)),
        "query_pre_attn_scalar": int(rng.integers(4, 30)),
        "embedding_multiplier": float(rng.uniform(0.5, 4)),
        "attention_multiplier": float(rng.uniform(0.1, 0.6)),
        "residual_multiplier": float(rng.uniform(0.3, 1.2)),
        "logits_scaling": float(rng.uniform(0.5, 4)),
        "partial_rotary_factor": 1.0,
    }
    common = {
        "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": INNER,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": groups,
        "rms_norm_eps": float(10 ** rng.uniform(-6, -3)), "bos_token_id": None,
        "eos_token_id": END if rng.integers(2) else [END, 11], "pad_token_id": PAD,
        "attention_dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    }  # fmt: skip
    named = {n: x for n, x in (common | maybe).items() if n in known or n in common}
    if kind == "smollm3":  # without rotation the gradient of keys' biases is 0 but for rounding
        named["attention_bias"] = False
    return (
        {n: x for n, x in named.items() if not n.endswith("_pdrop") or n in known}
        | _caps(kind, rng)
        | _positions(kind, rng, size)
        | _windows(kind, rng, layers)
        | _experts(kind, rng)
    )


def _experts(kind: str, rng: np.random.Generator) -> dict[str, Any]:
    """Up to as many as a token may choose, and more than a batch has tokens for."""
    if kind not in MIXTURES:
        return {}
    known, _ = hf_defaults(kind)
    count = int(rng.choice([1, 3, 8, 60]))
    settings = {
        "num_experts_per_tok": int(rng.choice([1, min(2, count), count])),
        "moe_intermediate_size": 4 * int(rng.integers(1, 5)),
        "shared_expert_intermediate_size": 4 * int(rng.integers(1, 5)),
        "norm_topk_prob": bool(rng.integers(2)),
        "qkv_bias": bool(rng.integers(2)),
        "swiglu_limit": float(rng.uniform(0.3, 3)),
        "swiglu_alpha": float(rng.uniform(1, 2)),
    }
    return {"num_experts": count} | {n: x for n, x in settings.items() if n in known}


def _caps(kind: str, rng: np.random.Generator) -> dict[str, Any]:
    caps = {"gemma2": ("attn_logit_softcapping", "final_logit_softcapping"),
            "gemma3_text": ("final_logit_softcapping",)}.get(kind, ())  # fmt: skip
    return {n: float(rng.uniform(2, 8)) if rng.integers(3) else None for n in caps}


def _windows(kind: str, rng: np.random.Generator, layers: int) -> dict[str, Any]:
    """Of 2 to 11 positions, shorter than the texts, or as long."""
    window = int(rng.integers(2, LENGTH))
    kinds = ["sliding_attention" if rng.integers(2) else "full_attention" for _ in range(layers)]
    match kind:
        case "mistral" | "ministral3" | "phi3" | "mixtral":
            return {"sliding_window": window if rng.integers(3) else None}
        case "gemma2" | "gemma3_text" | "olmo3" | "gpt_oss":
            return {"sliding_window": window, "layer_types": kinds}
        case "qwen2" | "qwen3" | "qwen2_moe" | "qwen3_moe":
            if not rng.integers(2):
                return {"use_sliding_window": False}
            most = int(rng.integers(layers + 1))
            found = {
                "use_sliding_window": True,
                "sliding_window": window,
                "max_window_layers": most,
            }
            return {n: x for n, x in found.items() if n in hf_defaults(kind)[0]}
        case "smollm3":
            return {"no_rope_layers": [int(rng.integers(2)) for _ in range(layers)]}
    return {}


def _positions(kind: str, rng: np.random.Generator, size: int) -> dict[str, Any]:
    """Angles of one of the kinds that an architecture may have."""
    if kind == "phi3":
        return _of_phi(rng, size)
    theta = float(rng.choice([100.0, 10000.0]))
    kinds: list[dict[str, Any]] = [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "dynamic", "factor": 4.0},
        {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 40},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40,
         "beta_fast": float(rng.uniform(2, 32)), "beta_slow": float(rng.uniform(0.2, 2)),
         "truncate": kind != "gpt_oss"},
    ]  # fmt: skip
    if ARCHITECTURES[kind].has_local_rope:
        del kinds[2]
    if kind == "ministral3":
        kinds = [kinds[-1] | {"llama_4_scaling_beta": 0.3, "original_max_position_embeddings": 4}]
    chosen = kinds[rng.integers(len(kinds))] | {"rope_theta": theta}
    longest = 8 if chosen["rope_type"] == "dynamic" else 160
    if ARCHITECTURES[kind].has_local_rope:
        near = {"rope_type": "default", "rope_theta": 50.0}
        chosen = {"sliding_attention": near, "full_attention": chosen}
    return {"rope_parameters": chosen, "max_position_embeddings": longest}


def _of_phi(rng: np.random.Generator, size: int) -> dict[str, Any]:
    """Texts and prompts have three tokens and more: all are longer than 2, none than 64."""
    fraction = float(rng.choice([0.5, 1.0]))
    pairs = int(size * fraction) // 2
    original = int(rng.choice([2, 64]))
    short, far = (np.round(rng.uniform(1, 6, pairs), 3).tolist() for _ in range(2))
    return {
        "partial_rotary_factor": fraction,
        "max_position_embeddings": 128,
        "original_max_position_embeddings": original,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": short,
            "long_factor": far, "partial_rotary_factor": fraction,
        },
    }  # fmt: skip
