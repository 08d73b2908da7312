"""Settings of config.json that a family does not read: passed over, or refused together."""

from __future__ import annotations

from typing import Any

import pytest

from config.errors import ConfigError
from config.families import FAMILIES, family_by_model_type
from files.json_files import JsonObject
from huggingface.multimodal import text_model_config
from modelling.model_family import load_family
from tests.huggingface.published import SUPPORTED, facts, small

MODELS = {
    "t5": "google/flan-t5-small",
    "gptj": "EleutherAI/gpt-j-6b",
    "llama": "meta-llama/Llama-3.2-1B-Instruct",
    "gemma2": "google/gemma-2-2b-it",
    "qwen3_moe": "Qwen/Qwen3-30B-A3B",
}


def hf_config(kind: str) -> dict[str, Any]:
    return small(facts()[MODELS[kind]]["config"])


def read(data: dict[str, Any]) -> dict[str, Any]:
    family = load_family(family_by_model_type()[data["model_type"]])
    return family.from_config_json(JsonObject(data, "config.json"))


NO_EFFECT: dict[str, Any] = {
    "_model_name_or_path": "somebody/model.gguf", "_commit_hash": "5f", "_anything": [1],
    "auto_map": {"AutoModelForCausalLM": "modeling.Model"}, "unk_token_id": 3,
    "image_token_index": 7, "sep_token": "<s>", "transformers_version": "9.0", "license": "mit",
    "axolotl_version": "1", "vocab_file": "a.json", "base_model_name_or_path": "x", "top_p": 0.5,
    "max_new_tokens": 9, "repetition_penalty": 1.1, "tokenizer_class": "Own", "dataset_path": "y",
    "_attn_implementation": "eager", "attn_implementation": "eager", "hidden_dropout": 0.3,
    "router_z_loss_coef": 0.1, "initializer_std": 1, "unsloth_fixed": True, "torch_dtype": "x",
    "transformers.js_config": {"a": 1}, "gradient_checkpointing": True, "use_cache": False,
    "padding_side": "left", "ignore_index": -100, "training_args": {"a": 1}, "seed": 3,
    "base_model": "x/y", "datasets": ["z"], "use_flash_attention": True, "model_parallel": True,
    "id2label": {"0": "a"}, "label2id": {"a": 0}, "num_labels": 1, "finetuning_task": "mnli",
}  # fmt: skip


@pytest.mark.parametrize("kind", MODELS)
def test_what_cannot_change_what_is_computed_is_passed_over(kind: str) -> None:
    """All of them at once, and what is off, whatever it would be."""
    off = {"qk_layernorm": False, "alibi": None, "num_extra_heads": 0, "quantization_config": None}
    assert read(hf_config(kind) | NO_EFFECT | off) == read(hf_config(kind))


COPIES = {
    "t5": {"hidden_size": "d_model", "num_hidden_layers": "num_layers", "head_dim": "d_kv"},
    "gptj": {"hidden_size": "n_embd", "n_ctx": "n_positions", "num_attention_heads": "n_head"},
    "llama": {"n_layers": "num_hidden_layers", "dim": "hidden_size", "n_kv_heads":
              "num_key_value_heads", "norm_eps": "rms_norm_eps"},
    "gemma2": {"sliding_window_size": "sliding_window", "hidden_act": "hidden_activation"},
    "qwen3_moe": {"experts_per_token": "num_experts_per_tok", "num_local_experts": "num_experts"},
}  # fmt: skip


@pytest.mark.parametrize("kind", COPIES)
def test_a_copy_of_another_setting_is_passed_over_if_it_is_equal(kind: str) -> None:
    data = hf_config(kind)
    copies = {name: data[original] for name, original in COPIES[kind].items()}
    assert read(data | copies) == read(data)
    changed = {n: f"no {x}" for n, x in copies.items() if n not in ("n_ctx", "num_local_experts")}
    with pytest.raises(ConfigError) as caught:
        read(data | changed)
    assert all(name in str(caught.value) for name in changed)


@pytest.mark.parametrize("name", SUPPORTED)
def test_a_published_model_of_whole_size_is_read_and_written(name: str) -> None:
    described = text_model_config(JsonObject(facts()[name]["config"], "config.json"), None).data
    kind = family_by_model_type()[described["model_type"]]
    model = read(described)
    # Training refuses to skip layers.
    model |= {name: 0.0 for name in model if name.endswith("layerdrop")}
    config = FAMILIES[kind].config.from_dict(
        {"family": kind, "model": model, "training": {"global_batch_size": 1}}
    )
    written = read(load_family(kind).to_config_json(config))
    again = FAMILIES[kind].config.from_dict(config.to_dict() | {"model": written})
    assert again.model == config.model


@pytest.mark.parametrize("token", [-1, 10**6])
@pytest.mark.parametrize("kind", MODELS)
def test_tokens_outside_of_the_vocabulary_are_none(kind: str, token: int) -> None:
    """LLaMA 1 has -1 for padding; a run takes the tokenizer's tokens."""
    data = hf_config(kind)
    ids = {name: None for name in data if name.endswith(("eos_token_id", "pad_token_id"))}
    odd = dict.fromkeys(ids, token)
    if kind == "llama":
        odd["eos_token_id"] = [token, token + 1]
    assert read(data | odd) == read(data | ids)


@pytest.mark.parametrize("kind", MODELS)
def test_all_that_may_change_it_is_named_in_one_sentence(kind: str) -> None:
    odd = {"qk_layernorm": True, "alibi_slopes": [1.0], "logit_multiplier": 3.0}
    with pytest.raises(ConfigError) as caught:
        read(hf_config(kind) | odd)
    said = str(caught.value)
    assert "has qk_layernorm True, alibi_slopes [1.0] and logit_multiplier 3.0, which are" in said
    assert f"not known of the kind {kind}: remove them only if the model does the same" in said


def test_many_are_counted() -> None:
    odd = {f"odd_{i}": i + 1 for i in range(9)}
    with pytest.raises(ConfigError, match="odd_0 1, .*, odd_5 6 and 3 more, which are not known"):
        read(hf_config("llama") | odd)


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        ("gptj", {"rotary": False}, "has rotary False, but must have True: no other gptj"),
        ("gptj", {"scale_attn_weights": False, "n_inner": 7}, "scale_attn_weights False, but "),
        ("gptj", {"n_inner": 7, "alibi": 1}, "n_inner 7, but must have 64, and alibi 1, which is"),
        ("gptj", {"rope_scaling": {"type": "linear"}}, "rope_scaling {'type': 'linear'}"),
        ("t5", {"is_decoder": True, "x": 1}, "is_decoder True, but must have False, and x 1, wh"),
        ("t5", {"quantization_config": {"bits": 8}}, "give the model before its weights were"),
        ("llama", {"quantization": {"bits": 4}}, "give the model before its weights were"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention True, wh"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, r"mlp_only_layers \[1\], which is not"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step 2, which is not known"),
        (
            "llama",
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "b": 1, "c": 2, "_d": 3}},
            "has b, c among the settings of the rope_type linear",
        ),
        ("llama", {"num_meta_tokens": 4}, "num_meta_tokens 4, which is not known"),
    ],
)
def test_what_is_computed_otherwise_is_refused(kind: str, change: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read(hf_config(kind) | change)
