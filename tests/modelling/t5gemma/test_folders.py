"""config.json and weights of T5Gemma 1 and 2: folders of transformers, both ways."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from config.errors import ConfigError
from files.json_files import JsonObject
from huggingface.model_folders import read_hf_directory, write_hf_directory
from huggingface.multimodal import text_tensors
from modelling.t5gemma.config_json import (
    from_config_json,
    normalize_config_json,
    to_config_json,
)
from run.export_extras import merge_multimodal_parts
from tests.modelling.t5gemma.hf import (
    ALL_KINDS,
    KINDS,
    START,
    VISION,
    hf_model,
    is_merged,
    our_config,
    weights_of,
)
from tests.modelling.weight_maps import base_weight_map


@pytest.mark.parametrize("kind", KINDS)
def test_export_is_loaded_by_transformers_bit_for_bit(kind: str, tmp_path: Path) -> None:
    config, theirs = our_config(kind), hf_model(kind)
    write_hf_directory(tmp_path / "hf", weights_of(theirs), to_config_json(config))
    loaded = transformers.T5GemmaForConditionalGeneration.from_pretrained(
        tmp_path / "hf", attn_implementation="eager"
    )
    for name, value in theirs.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    input_ids = torch.tensor([[2, 5, 6, 7, 8, 9, 1]])
    with torch.no_grad():
        ours = loaded(input_ids=input_ids, decoder_input_ids=input_ids).logits
        assert torch.equal(ours, theirs(input_ids=input_ids, decoder_input_ids=input_ids).logits)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_folder_of_transformers_is_read_bit_for_bit(kind: str, tmp_path: Path) -> None:
    hf_model(kind).save_pretrained(tmp_path)
    weight_map = base_weight_map(our_config(kind, tp=2))
    files = read_hf_directory(tmp_path)
    weights = weight_map.from_hf(text_tensors(files) if is_merged(kind) else files)
    expected = weights_of(hf_model(kind))
    assert {w.name: w.shape for w in weight_map.weights} == {
        n: x.shape for n, x in expected.items()
    }
    assert all(np.array_equal(weights[n], x) for n, x in expected.items())


def test_our_configuration_is_read_back() -> None:
    for kind in (*ALL_KINDS, "t5gemma 0", "t5gemma 1", "t5gemma2 2"):
        config, theirs = our_config(kind), hf_model(kind).config.to_dict()
        written = to_config_json(config)
        read = from_config_json(JsonObject(written, "config.json"))
        assert read == from_config_json(JsonObject(theirs, "config.json"))
        assert normalize_config_json(config, theirs) == written


def test_an_export_of_t5gemma2_takes_over_the_weights_for_images(tmp_path: Path) -> None:
    theirs, config = hf_model("t5gemma2"), our_config("t5gemma2")
    theirs.save_pretrained(tmp_path / "whole")
    config = config.with_values({"model.multimodal_parent": str(tmp_path / "whole")})
    trained = {name: x + 1 for name, x in weights_of(theirs).items()}
    merged = merge_multimodal_parts(config, trained, to_config_json(config))
    write_hf_directory(tmp_path / "hf", *merged[:2])
    loaded = transformers.T5Gemma2ForConditionalGeneration.from_pretrained(tmp_path / "hf")
    assert loaded.config.encoder.vision_config.hidden_size == VISION["hidden_size"]
    for name, value in loaded.named_parameters():
        before = dict(theirs.named_parameters())[name]
        expected = before + 1 if name in trained else before
        assert torch.equal(value, expected), name


PUBLISHED_STACK: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "attn_logit_softcapping": 50.0,
    "classifier_dropout_rate": 0.0, "dropout_rate": 0.0, "final_logit_softcapping": 30.0,
    "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304,
    "initializer_range": 0.02, "intermediate_size": 9216, "is_decoder": False,
    "layer_types": ["sliding_attention", "full_attention"] * 13, "max_position_embeddings": 8192,
    "model_type": "t5_gemma_module", "num_attention_heads": 8, "num_hidden_layers": 26,
    "num_key_value_heads": 4, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0, "sliding_window": 4096, "torch_dtype": "bfloat16", "use_cache": True,
    "vocab_size": 256000,
}  # fmt: skip


def published(stack: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """Fields for a config.json as google/t5gemma-9b-2b-prefixlm-it has it, from memory."""
    encoder = {
        "hidden_size": 3584, "intermediate_size": 14336, "num_attention_heads": 16,
        "num_hidden_layers": 42, "num_key_value_heads": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 21,
    }  # fmt: skip
    decoder = {"is_decoder": True, "cross_attention_hidden_size": 3584}
    data = {
        "architectures": ["T5GemmaForConditionalGeneration"], "model_type": "t5gemma",
        "attention_dropout": 0.0, "classifier_dropout_rate": 0.0, "dropout_rate": 0.0,
        "bos_token_id": 2, "eos_token_id": [1, 107], "pad_token_id": 0, "vocab_size": 256000,
        "initializer_range": 0.02, "is_encoder_decoder": True, "use_cache": True,
        "torch_dtype": "bfloat16", "transformers_version": "4.53.0.dev0",
        "encoder": PUBLISHED_STACK | encoder | (stack or {}),
        "decoder": PUBLISHED_STACK | decoder,
    }  # fmt: skip
    data = copy.deepcopy(data | changes)
    return from_config_json(JsonObject(json.loads(json.dumps(data)), "config.json"))


def test_a_published_file_is_that_of_9b_2b() -> None:
    found = published()
    assert found["encoder"]["num_hidden_layers"] == 42
    assert found["decoder"]["layer_types"] == "sliding_attention,full_attention"
    assert (found["bos_token_id"], found["eos_token_ids"]) == (START, "1,107")
    assert found["tie_word_embeddings"]


@pytest.mark.parametrize(
    ("stack", "changes", "said"),
    [
        ({"attention_bias": True}, {}, "attention_bias True"),
        ({"vocab_size": 256128}, {}, "encoder.vocab_size 256128 and decoder.vocab_size 256000"),
        ({"num_experts": 4}, {}, "num_experts 4"),
        ({"rope_parameters": {"rope_type": "made_up", "rope_theta": 1e4}}, {}, "made_up"),
        ({}, {"is_encoder_decoder": False}, "is_encoder_decoder False"),
        ({}, {"encoder": 3}, "encoder"),
        ({}, {"router": "top"}, "router 'top'"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    stack: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(Exception, match=said) as caught:
        published(stack, **changes)
    assert isinstance(caught.value, ConfigError) or "config.json" in str(caught.value)
