"""BART's config.json and weights: folders of transformers, both ways."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from config.errors import ConfigError
from files.json_files import JsonObject
from huggingface.model_folders import read_hf_directory, write_hf_directory
from modelling.bart.config_json import from_config_json, to_config_json
from run.resume import resolve_initial_state
from tests.modelling.bart.hf import (
    BOS,
    KINDS,
    PAD,
    SIZES,
    VOCABULARY,
    description_of,
    hf_model,
    our_config,
    settings_of,
    weights_of,
)
from tests.modelling.weight_maps import base_weight_map

FILE = "model.safetensors"


@pytest.mark.parametrize("kind", KINDS)
def test_export_is_loaded_by_transformers_bit_for_bit(kind: str, tmp_path: Path) -> None:
    config, theirs = our_config(kind), hf_model(kind)
    write_hf_directory(tmp_path / "hf", weights_of(theirs), to_config_json(config))
    loaded = type(theirs).from_pretrained(tmp_path / "hf")
    for name, value in theirs.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    assert loaded.config.model_type == config.model.model_type
    assert loaded.generation_config.forced_eos_token_id == config.model.forced_eos_token_id
    input_ids = torch.tensor([[0, 5, 6, 7, 2]])
    with torch.no_grad():
        ours = loaded(input_ids=input_ids, decoder_input_ids=input_ids).logits
        assert torch.equal(ours, theirs(input_ids=input_ids, decoder_input_ids=input_ids).logits)


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_of_transformers_is_read_bit_for_bit(kind: str, tmp_path: Path) -> None:
    hf_model(kind).save_pretrained(tmp_path)
    weights = base_weight_map(our_config(kind)).from_hf(read_hf_directory(tmp_path))
    expected = weights_of(hf_model(kind))
    assert weights.keys() == expected.keys()
    assert all(np.array_equal(weights[n], x) for n, x in expected.items())


def test_a_folder_without_a_head_is_read_as_transformers_does(tmp_path: Path) -> None:
    """BART base and large are published so: names lack "model.", nor is there a bias of the logits.
    Old files have copies of the embedding, and versions of fairseq's."""
    hf_model().model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / FILE)
    tensors["encoder.embed_tokens.weight"] = tensors["shared.weight"].copy()
    tensors["encoder.version"] = np.array([3.0], np.float32)
    save_file(tensors, tmp_path / FILE, {"format": "pt"})
    config = our_config()
    config = replace(config, checkpoint=replace(config.checkpoint, load=str(tmp_path)))
    start = resolve_initial_state(config, base_weight_map(config)).tensors
    expected = weights_of(hf_model()) | {"final_logits_bias": np.zeros((1, VOCABULARY), np.float32)}
    assert start.keys() == expected.keys()
    assert all(np.array_equal(start[n], x) for n, x in expected.items())


def published(**changes: Any) -> dict[str, Any]:
    """Fields for a config.json as facebook/bart-large has it."""
    data = {
        "model_type": "bart", "vocab_size": 50265, "d_model": 1024, "encoder_layers": 12,
        "decoder_layers": 12, "encoder_attention_heads": 16, "decoder_attention_heads": 16,
        "encoder_ffn_dim": 4096, "decoder_ffn_dim": 4096, "num_hidden_layers": 12,
        "activation_function": "gelu", "dropout": 0.1, "attention_dropout": 0.1,
        "activation_dropout": 0.1, "classif_dropout": 0.1, "classifier_dropout": 0.0,
        "max_position_embeddings": 1024, "init_std": 0.02, "scale_embedding": False,
        "add_bias_logits": False, "add_final_layer_norm": False, "normalize_before": False,
        "normalize_embedding": True, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0,
        "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2,
        "forced_bos_token_id": 0, "forced_eos_token_id": 2, "is_encoder_decoder": True,
        "early_stopping": True, "no_repeat_ngram_size": 3, "num_beams": 4, "use_cache": True,
    }  # fmt: skip
    return from_config_json(JsonObject(json.loads(json.dumps(data | changes)), "config.json"))


def test_a_published_file_is_that_of_bart_large() -> None:
    found = published()
    assert (found["encoder_layers"], found["hidden_size"]) == (12, 1024)
    assert (found["forced_bos_token_id"], found["decoder_start_token_id"]) == (BOS, 2)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"normalize_before": True}, "normalize_before True"),
        ({"activation_function": "tanh"}, "activation_function 'tanh'"),
        ({"forced_bos_token_id": "a"}, "forced_bos_token_id"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings False"),
        ({"sliding_window": 9}, "sliding_window 9"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(change: dict[str, Any], said: str) -> None:
    with pytest.raises(Exception, match=said) as caught:
        published(**change)
    assert isinstance(caught.value, ConfigError) or "config.json" in str(caught.value)


def test_skipped_layers_are_refused_in_training_alone() -> None:
    """m2m100_418M is published so."""
    fields = {"model.decoder_layerdrop": 0.05}
    with pytest.raises(ConfigError, match="decoder_layerdrop 0.05, .*: set both 0"):
        our_config("m2m_100").with_values(fields)
    config = our_config("m2m_100").with_values(fields | {"model.eval": True})
    assert to_config_json(config)["decoder_layerdrop"] == 0.05


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        ("m2m_100", {"decoder_start_token_id": PAD}, "whose positions do not count padding"),
        ("m2m_100", {"hidden_size": 2, "encoder_attention_heads": 2}, "even and at least 4"),
        ("mbart", {"decoder_vocab_size": 9}, "is for model.model_type marian, not mbart"),
        ("two vocabularies", {"new_rows": "7"}, "new_rows is for models with one vocabulary"),
    ],
)
def test_rules_of_types_are_said(kind: str, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        our_config(kind, **fields)


@pytest.mark.parametrize("kind", ["marian", "pegasus"])
def test_positions_that_a_folder_lacks_are_transformers(kind: str, tmp_path: Path) -> None:
    theirs = copy.deepcopy(hf_model(kind))
    theirs.save_pretrained(tmp_path)
    names = [f"model.{stack}.embed_positions.weight" for stack in ("encoder", "decoder")]
    tensors = {n: x for n, x in load_file(tmp_path / FILE).items() if n not in names}
    save_file(tensors, tmp_path / FILE, {"format": "pt"})
    expected = type(theirs).from_pretrained(tmp_path).state_dict()
    weight_map = base_weight_map(our_config(kind))
    weights = weight_map.from_hf(read_hf_directory(tmp_path))
    initial = weight_map.init_weights(0)
    for name in names:
        np.testing.assert_allclose(weights[name], expected[name].numpy(), rtol=0, atol=1e-7)
        np.testing.assert_array_equal(weights[name], initial[name])


def test_our_configuration_is_read_back() -> None:
    for kind in KINDS:
        written = to_config_json(our_config(kind))
        read = from_config_json(JsonObject(written, "config.json"))
        assert read == from_config_json(JsonObject(description_of(kind), "config.json"))
        assert {n: written[n] for n in SIZES} == settings_of(kind) or kind != "as published"
