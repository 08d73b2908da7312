"""config.json of every architecture, in both dialects and both directions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from config.errors import ConfigError
from files.json_files import Fields
from huggingface.folders import read_hf_directory, write_hf_directory
from modelling.llama.config_json import ARCHITECTURES, from_config_json, to_config_json
from modelling.llama.rotary import scaled_frequencies
from modelling.llama.weights import weight_table
from tests.modelling.llama.hf import LENGTH, SETTINGS, hf_config, hf_model, our_config, weights_of


def read(data: dict[str, Any]) -> dict[str, Any]:
    return from_config_json(Fields(data, "config.json"))


@pytest.mark.parametrize("kind", SETTINGS)
def test_both_dialects_say_the_same(kind: str) -> None:
    config = our_config(hf_config(kind))
    written = to_config_json(config)
    former = {n: x for n, x in written.items() if n != "rope_parameters"}
    today = {n: x for n, x in written.items() if n not in ("rope_theta", "rope_scaling")}
    assert read(written) == read(former) == read(today)


@pytest.mark.parametrize("kind", SETTINGS)
def test_export_is_loaded_by_transformers_bit_for_bit(kind: str, tmp_path: Path) -> None:
    theirs = hf_config(kind)
    model, config = hf_model(theirs), our_config(theirs)
    weights, table = weights_of(model), weight_table(config)
    files = table.for_files(table.renamed(weights))
    write_hf_directory(tmp_path / "hf", files, to_config_json(config), shard_bytes=4000)
    loaded = getattr(transformers, ARCHITECTURES[kind]).from_pretrained(tmp_path / "hf")
    found = {n: p.detach().numpy() for n, p in loaded.named_parameters()}
    assert weights.keys() <= found.keys()
    assert all(np.array_equal(found[n], x) for n, x in weights.items())
    again = table.renamed(read_hf_directory(tmp_path / "hf"))
    assert all(np.array_equal(again[n], x) for n, x in table.renamed(weights).items())


@pytest.mark.parametrize("kind", SETTINGS)
def test_frequencies_are_transformers(kind: str) -> None:
    """Of texts as long as those of training here."""
    theirs = hf_config(kind)
    module = hf_model(theirs).model.rotary_emb
    if kind == "gemma3_text":
        expected = module.full_attention_inv_freq
    else:
        import torch

        module(torch.zeros(1), torch.arange(LENGTH)[None])  # which may scale by the length
        expected = module.inv_freq
    model = our_config(theirs).model
    rotary, rotated = model.attention.rotary, model.attention.rotated
    ours, _ = scaled_frequencies(rotary, rotated, model.max_length, LENGTH)
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
        ("llama", {"hidden_act": "relu2"}, "the activation 'relu2'"),
        ("llama", {"sliding_window": 4}, "sliding_window 4"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
        (
            "qwen2",
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}},
            "the rope_type 'yarn'",
        ),
    ],
)
def test_what_is_not_known_is_refused_by_name(kind: str, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(hf_config(kind).to_dict() | given)
    assert said in str(caught.value)
    assert len(str(caught.value)) < 300


def test_what_the_architecture_cannot_do_is_refused() -> None:
    config = our_config(hf_config("mistral"), logits_cap=3.0)
    with pytest.raises(ConfigError, match=r"model.logits_cap 3.0, but a model of .* mistral"):
        to_config_json(config)
