"""GPT-J's configuration: its defaults are the published model's, and the rules between fields."""

from __future__ import annotations

import pytest
from transformers import GPTJConfig as HuggingFaceGPTJConfig

from config.errors import ConfigError
from config.gptj import GPTJConfig
from config.presets import load_config


def test_defaults_are_gpt_j_6b():
    model, theirs = GPTJConfig().model, HuggingFaceGPTJConfig()
    ours = {
        "vocab_size": model.embedding.vocab_size,
        "n_embd": model.hidden_size,
        "n_layer": model.layers,
        "n_head": model.attention.heads,
        "rotary_dim": model.attention.rotary_dim,
        "layer_norm_epsilon": model.layer_norm_epsilon,
        "initializer_range": model.initializer_range,
        "eos_token_id": model.eos_token_id,
    }
    assert ours == {name: getattr(theirs, name) for name in ours}
    assert model.pad_token_id == model.eos_token_id + 1  # <|extratoken_1|>


@pytest.mark.parametrize("name", ["gptj_6B_1024_pod16", "gptj_6B_1024_pod64", "gptj_6B_gpu"])
def test_large_presets_are_gpt_j_6b_with_the_seeds_defaults(name):
    config = load_config(GPTJConfig, "finetuning", name)
    default = GPTJConfig()
    assert config.model.to_dict() == default.model.to_dict() | {"precision": config.model.precision}
    optimizer = config.training.optimizer
    assert (optimizer.beta1, optimizer.beta2, optimizer.weight_decay) == (0.9, 0.999, 0.0)


@pytest.mark.parametrize(
    ("name", "replicas"), [("gptj_tiny", 1), ("gptj_6B_1024_pod16", 16), ("gptj_6B_1024_pod64", 64)]
)
def test_replicas(name, replicas):
    assert load_config(GPTJConfig, "finetuning", name).num_replicas == replicas


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"model": {"attention": {"rotary_dim": 63}}},
            "rotary_dim 63 must be even: pairs are rotated",
        ),
        (
            {"model": {"attention": {"rotary_dim": 258}}},
            "model.attention.rotary_dim 258 must be at most the size of a head, hidden_size 4096 / "
            "heads 16 = 256",
        ),
        (
            {"model": {"hidden_size": 100}},
            "model.hidden_size 100 must be divisible by 16 model.attention.heads",
        ),
        (
            {"model": {"embedding": {"vocab_size": 50257}}},
            "model.pad_token_id 50257 must be below model.embedding.vocab_size 50257",
        ),
        (
            {"execution": {"tensor_parallel": 32}, "training": {"global_batch_size": 1}},
            "model.attention.heads 16 must be divisible by execution.tensor_parallel 32",
        ),
    ],
)
def test_numbers_that_do_not_fit(data, message):
    with pytest.raises(ConfigError) as info:
        GPTJConfig.from_dict(data)
    assert str(info.value) == message
