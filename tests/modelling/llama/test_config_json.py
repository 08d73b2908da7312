"""config.json of every architecture, in both dialects and both directions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from config.adapter import Adapter
from config.errors import ConfigError
from config.llama import LlamaConfig
from files.json_files import JsonObject
from huggingface.model_folders import read_hf_directory, write_hf_directory
from modelling.llama.config_json import (
    ARCHITECTURES,
    from_config_json,
    normalize_config_json,
    to_config_json,
)
from modelling.llama.rotary import scaled_frequencies
from tests.modelling.llama.hf import LENGTH, SETTINGS, hf_config, hf_model, our_config, weights_of
from tests.modelling.weight_maps import base_weight_map


def read(data: dict[str, Any]) -> dict[str, Any]:
    return from_config_json(JsonObject(data, "config.json"))


@pytest.mark.parametrize("kind", SETTINGS)
def test_both_dialects_say_the_same(kind: str) -> None:
    config = our_config(hf_config(kind))
    written = to_config_json(config)
    former = {n: x for n, x in written.items() if n != "rope_parameters"}
    today = {n: x for n, x in written.items() if n not in ("rope_theta", "rope_scaling")}
    assert read(written) == read(former) == read(today)
    assert "rope_theta" not in (written["rope_scaling"] or {}), "as before transformers 5"


@pytest.mark.parametrize("kind", SETTINGS)
def test_export_is_loaded_by_transformers_bit_for_bit(kind: str, tmp_path: Path) -> None:
    hf_cfg = hf_config(kind)
    model, config = hf_model(hf_cfg), our_config(hf_cfg)
    weights, weight_map = weights_of(model), base_weight_map(config)
    files = weight_map.to_hf(weight_map.from_hf(weights))
    write_hf_directory(tmp_path / "hf", files, to_config_json(config), shard_bytes=4000)
    loaded = getattr(transformers, ARCHITECTURES[kind].cls).from_pretrained(tmp_path / "hf")
    found = {n: p.detach().numpy() for n, p in loaded.named_parameters()}
    assert weights.keys() <= found.keys()
    assert all(np.array_equal(found[n], x) for n, x in weights.items())
    again = weight_map.from_hf(read_hf_directory(tmp_path / "hf"))
    assert all(np.array_equal(again[n], x) for n, x in weight_map.from_hf(weights).items())


def test_a_description_is_normalised_beside_packed_weights_too() -> None:
    """Quantized weights need adapters that are trained beside them."""
    config = our_config(hf_config("qwen3"))
    packed = replace(config.model, quantization="int4", quantization_group_size=4)
    config = replace(config, model=packed, adapter=Adapter(rank=2))
    assert normalize_config_json(config, to_config_json(config)) == to_config_json(config)


YARN = {"rope_type": "yarn", "rope_theta": 500.0, "original_max_position_embeddings": 40}
"""Of 6 pairs of features, two stay, three are mixed, and one is stretched."""

YARNS: dict[str, dict[str, Any]] = {
    "by the factor": {"factor": 4.0},
    "as said": {"factor": 4.0, "attention_factor": 0.7, "beta_fast": 5.0, "beta_slow": 2.0},
    "by two more": {"factor": 8.0, "mscale": 0.8, "mscale_all_dim": 0.4, "truncate": True},
    "by the lengths": {"factor": None},
    "between pairs": {"factor": 4.0, "truncate": False},
}


@pytest.mark.parametrize("how", YARNS)
def test_yarn_is_transformers(how: str) -> None:
    hf_cfg = hf_config("qwen3", rope_parameters=YARN | YARNS[how], max_position_embeddings=160)
    module = hf_model(hf_cfg).model.rotary_emb
    config = our_config(hf_cfg)
    rope, rotary_dim = config.model.rope_parameters, config.model.rotary_dim
    ours, scale = scaled_frequencies(config.model, LENGTH)
    np.testing.assert_allclose(ours, module.inv_freq.numpy(), rtol=1e-6)
    assert scale == pytest.approx(module.attention_scaling, rel=1e-12)
    again = our_config(transformers.Qwen3Config(**to_config_json(config)))
    assert again.model.rope_parameters == rope
    plain_model = replace(config.model, rope_parameters=replace(rope, rope_type="default"))
    plain = scaled_frequencies(plain_model, LENGTH)[0]
    assert 1 < len(set(np.round(ours / plain, 5))) < rotary_dim // 2 + 1


@pytest.mark.parametrize("kind", SETTINGS)
def test_frequencies_are_transformers(kind: str) -> None:
    """Of texts as long as those of training here."""
    hf_cfg = hf_config(kind)
    module = hf_model(hf_cfg).model.rotary_emb
    if ARCHITECTURES[kind].has_local_rope:
        expected = module.full_attention_inv_freq
    else:
        import torch

        module(torch.zeros(1), torch.arange(LENGTH)[None])  # which may scale by the length
        expected = module.inv_freq
    ours, _ = scaled_frequencies(our_config(hf_cfg).model, LENGTH)
    np.testing.assert_allclose(ours, expected.numpy(), rtol=1e-6)


@pytest.mark.parametrize(
    ("kind", "given", "said"),
    [
        (
            "llama",
            {"qk_layernorm": True},
            "qk_layernorm True, which is not known of the kind llama",
        ),
        ("qwen3", {"num_experts": 8}, "num_experts 8"),
        ("llama", {"hidden_act": "relu2"}, "model.hidden_act is 'relu2', but must be one of silu"),
        ("llama", {"sliding_window": 4}, "sliding_window 4"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("gpt_oss", {"quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes"),
        (
            "qwen2",
            {"rope_parameters": {"rope_type": "proportional", "factor": 4.0, "rope_theta": 1e4}},
            "the rope_type 'proportional'",
        ),
        (
            "qwen3",
            {"rope_parameters": YARN | {"factor": 4.0, "low_freq_factor": 2.0}},
            "low_freq_factor among the settings of the rope_type yarn",
        ),
    ],
)
def test_what_is_not_known_is_refused_by_name(kind: str, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LlamaConfig.from_dict({"model": read(hf_config(kind).to_dict() | given)})
    assert said in str(caught.value)
    assert len(str(caught.value)) < 300


def test_what_the_architecture_cannot_do_is_refused() -> None:
    config = our_config(hf_config("mistral"), final_logit_softcapping=3.0)
    with pytest.raises(
        ConfigError, match=r"model.final_logit_softcapping 3.0, but a model of .* mistral"
    ):
        to_config_json(config)
