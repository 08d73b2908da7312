"""Embedding models that are exported: sentence-transformers loads them, with equal vectors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from config.bart import BartConfig
from config.errors import ConfigError
from config.presets import load_config
from config.t5gemma import T5GemmaConfig
from data.text_samples import make_text_samples, tokenize_texts
from files.json_files import JsonObject
from huggingface.sentence_transformers_files import (
    embedding_run_settings,
    write_sentence_transformers_files,
)
from modelling.model_family import get_family
from planning.config_loader import CONFIG_LOADER
from run.evaluation.retrieval import embed
from run.hf_export import export_checkpoint, export_model
from run.model_weights import read_weights
from sessions.loss_evaluation import LossSession
from tests.data.test_contrastive import data_of

TEXTS = ["Anna took the lamp", "a cat", "the bus went to the garden by ferry at noon", "Ben"]


def vectors_of(config: Any, data: Any, weights: Any) -> np.ndarray:
    """The vectors of `TEXTS` by the session of the loss."""
    tokens = tokenize_texts(TEXTS, config, data.tokenizer)
    session = LossSession(config)
    session.write(weights)
    with session:
        return embed(session, make_text_samples(tokens, 1, config, data.tokenizer))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "pooling", "bidirectional"),
    [
        ("tiny", "mean", False),
        ("gptj_tiny", "eos", False),
        ("gptj_tiny", "mean", True),
        ("qwen3_tiny", "last", False),
        ("qwen3_tiny", "mean", True),
    ],
)
def test_sentence_transformers_loads_what_is_exported(
    tmp_path: Path, preset: str, pooling: str, bidirectional: bool
) -> None:
    from sentence_transformers import SentenceTransformer

    rows: Any = [{"anchor": "Anna", "positive": "the lamp"}]
    settings = {"pooling": pooling, "bidirectional": bidirectional}
    data = data_of(tmp_path, rows, preset, 48, prompt="query: {anchor}", **settings)
    config = data.config.with_values({"checkpoint.load": "random"})
    folder = tmp_path / "model"
    export_checkpoint(config, str(folder))
    weights = get_family(config).weight_map(config).init_weights(config.model.seed)
    ours = vectors_of(config, data, weights)
    model = SentenceTransformer(str(folder), device="cpu")
    theirs = model.encode(TEXTS)
    np.testing.assert_allclose(ours, theirs, atol=2e-6)
    assert model.max_seq_length == 48
    assert model.prompts["query"] == "query: "
    again, _ = read_weights(config, get_family(config).weight_map(config), str(folder))
    assert {*again} == {*weights}
    for name in weights:
        np.testing.assert_array_equal(again[name], weights[name], err_msg=name)


def test_the_files_that_sentence_transformers_reads(tmp_path: Path) -> None:
    rows: Any = [{"anchor": "Anna", "positive": "the lamp"}]
    templates = {"prompt": "query: {anchor}", "target": "{positive}"}
    data = data_of(tmp_path, rows, pooling="eos", bidirectional=True, **templates)
    export_checkpoint(data.config.with_values({"checkpoint.load": "random"}), str(tmp_path / "m"))

    def read(name: str) -> Any:
        return json.loads((tmp_path / "m" / name).read_text())

    model = read("config.json")
    assert (model["architectures"], model["is_causal"]) == (["GPTJModel"], False)
    assert [module["path"] for module in read("modules.json")] == ["", "1_Pooling", "2_Normalize"]
    assert read("1_Pooling/config.json")["pooling_mode_lasttoken"] is True
    assert read("1_Pooling/config.json")["pooling_mode_mean_tokens"] is False
    assert read("2_Normalize/config.json") == {}
    assert read("sentence_bert_config.json")["max_seq_length"] == 64
    assert read("config_sentence_transformers.json")["prompts"] == {"query": "query: "}
    card = (tmp_path / "m" / "README.md").read_text()
    assert "library_name: sentence-transformers" in card
    assert "pipeline_tag: sentence-similarity" in card
    assert 'model = SentenceTransformer(".")' in card
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m")
    (ids,) = tokenize_texts(["Anna took"], data.config, data.tokenizer)
    assert tokenizer("Anna took")["input_ids"] == ids.tolist()
    assert ids[-1] == tokenizer.eos_token_id


def test_an_exported_model_is_trained_on(tmp_path: Path) -> None:
    rows: Any = [{"anchor": "Anna", "positive": "the lamp"}]
    data = data_of(tmp_path, rows, pooling="last", bidirectional=True)
    export_checkpoint(data.config.with_values({"checkpoint.load": "random"}), str(tmp_path / "m"))
    fields = CONFIG_LOADER.from_model(str(tmp_path / "m"))
    assert fields["training"] == {
        "objective": "contrastive", "pooling": "last", "bidirectional": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("modules.json", [{"type": "a.Dense", "path": "2_Dense"}], "has the module Dense of sent"),
        ("modules.json", [{"type": "a.Transformer", "path": ""}], "has no module Pooling of sent"),
        ("modules.json", {"a": 1}, "is no list of modules of sentence-transformers"),
        ("1_Pooling/config.json", {"pooling_mode": "cls"}, "pools by cls, but mean and lasttoken"),
        ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}, "pools by max_tokens, but me"),
    ],
)
def test_other_modules_are_named(tmp_path: Path, name: str, content: Any, message: str) -> None:
    data = data_of(tmp_path, [{"anchor": "Anna", "positive": "the lamp"}])
    write_sentence_transformers_files(tmp_path, data.config)
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=message):
        embedding_run_settings(tmp_path, JsonObject({}, "config.json"))


def test_pooling_in_the_newer_form_is_read(tmp_path: Path) -> None:
    data = data_of(tmp_path, [{"anchor": "Anna", "positive": "the lamp"}])
    write_sentence_transformers_files(tmp_path, data.config)
    pooling = {"embedding_dimension": 8, "pooling_mode": "lasttoken", "include_prompt": True}
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    settings, _ = embedding_run_settings(tmp_path, JsonObject({}, "config.json"))
    assert settings == {"training": {"objective": "contrastive", "pooling": "last"}}


def test_adapters_are_merged_first(tmp_path: Path) -> None:
    rows: Any = [{"anchor": "Anna", "positive": "the lamp"}]
    config = data_of(tmp_path, rows).config.with_values({"adapter.rank": 2})
    weights = get_family(config).weight_map(config).init_weights(0)
    with pytest.raises(ConfigError, match="loads whole models: give --merge"):
        export_model(config, weights, tmp_path / "m")


@pytest.mark.parametrize(
    ("family", "preset"), [(BartConfig, "bart_tiny"), (T5GemmaConfig, "t5gemma_tiny")]
)
def test_other_encoders_are_refused(family: Any, preset: str) -> None:
    config = load_config(family, "finetuning", preset, {})
    with pytest.raises(ConfigError, match="decoder-only models and T5's encoder, not for"):
        config.with_values({"training.objective": "contrastive"})
