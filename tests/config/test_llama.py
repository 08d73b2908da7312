"""The configuration of Llama-shaped models: the rules between its fields, and its flags."""

from __future__ import annotations

from typing import Any

import pytest

from config.errors import ConfigError
from config.llama import FULL, SLIDING, LlamaConfig
from terminal.command_line import read_command_line

LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 4}


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"num_key_value_heads": 5}, "model.num_attention_heads 32 must be divisible by 5 model."),
        ({"layer_types": "chunked_attention"}, "must be full_attention or sliding_attention, sep"),
        ({"layer_types": [FULL, SLIDING]}, "has sliding_attention: set model.sliding_window"),
        ({"no_rope_layers": [1] * 33}, "model.no_rope_layers names 33 layers, but there are 32 "),
        ({"eos_token_ids": "2,32000"}, "must be tokens below model.vocab_size 32000, with commas"),
        ({"head_dim": 9}, "model.head_dim 9 × .* must be an even number of features, but is 9"),
        ({"num_experts": 8}, "model.num_experts is for model.model_type mixtral, .*, not llama"),
        ({"model_type": "mixtral"}, "model.model_type mixtral needs model.num_experts"),
        ({"model_type": "granite"}, "model.model_type granite needs model.attention_multiplier"),
        ({"model_type": "mixtral", "num_experts": 2, "num_experts_per_tok": 3}, "at most"),
        ({"router_aux_loss_coef": 0.1}, "model.router_aux_loss_coef needs model.num_experts"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2}}, "yarn needs rope_parameters.or"),
        ({"rope_parameters": {"llama_4_scaling_beta": 1}}, "beta needs rope_parameters.original"),
        ({"rope_parameters": {"low_freq_factor": 4}}, "low_freq_factor 4.0 must be below high_"),
        ({"rope_parameters": {"beta_slow": 64}}, "beta_slow 64.0 must be at most beta_fast 32.0"),
        (
            {"rope_parameters": LONGROPE | {"short_factor": [1, 2.5], "long_factor": "1,2"}},
            "rope_parameters.short_factor has 2 numbers, but 64 pairs of features are turned",
        ),
        ({"rope_parameters": {"long_factor": "1,-2"}}, "must be positive numbers, separated by"),
    ],
)
def test_fields_that_do_not_fit(model: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        LlamaConfig.from_dict({"model": model})


def test_types_of_layers_are_repeated() -> None:
    model = {"layer_types": [SLIDING, FULL], "sliding_window": 4, "num_hidden_layers": 5}
    types = LlamaConfig.from_dict({"model": model | {"no_rope_layers": "1,1,0"}}).model.layers
    assert [layer.is_sliding for layer in types] == [True, False, True, False, True]
    assert [layer.has_rope for layer in types] == [True, True, False, True, True]
    (alone,) = {*LlamaConfig.from_dict({"model": {"sliding_window": 4}}).model.layers}
    assert alone.is_sliding


@pytest.mark.parametrize(
    ("flag", "hint"),
    [
        ("--layers", "--num_hidden_layers"),
        ("--heads", "--num_attention_heads"),
        ("--vocab_size", "--model.vocab_size"),
        ("--model.attention.heads", "--num_attention_heads"),
        ("--model.rotary.theta", "--model.rope_parameters.rope_theta"),
    ],
)
def test_flags_of_other_families_are_answered_with_ours(flag: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=rf"unknown option {flag}; did you mean .*{hint}\b"):
        read_command_line("", "finetuning", "tiny", ["--config", "qwen3_tiny", flag, "2"])


def test_lists_are_taken_with_commas_or_spaces() -> None:
    given = ["--config", "qwen3_tiny", "--model.sliding_window", "4", "--model.layer_types"]
    for types in ([f"{SLIDING},{FULL}"], [SLIDING, FULL]):
        config = read_command_line("", "finetuning", "tiny", [*given, *types]).config
        assert config.model.to_dict()["layer_types"] == f"{SLIDING},{FULL}"
