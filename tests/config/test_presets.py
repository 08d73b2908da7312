"""Presets: inheritance, strict YAML, and that every one we ship is valid and as published."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from transformers import T5Config as HuggingFaceT5Config

from config.errors import ConfigError
from config.families import config_class_of_preset
from config.presets import DIRECTORY, load_config, load_preset, merge_over, preset_names
from config.t5 import T5Config

FILES = ("finetuning", "inference")
SHIPPED = [(file, name) for file in FILES for name in preset_names(file)]


@pytest.fixture
def presets(tmp_path):
    """Write a file of presets and return its path."""

    def write(text, name="some.yml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def config_of(file, name):
    return load_config(config_class_of_preset(load_preset(file, name), name), file, name)


@pytest.mark.parametrize(("file", "name"), SHIPPED)
def test_shipped_presets_are_valid(file, name):
    config = config_of(file, name)
    assert config.model.eval == (file == "inference")


def test_both_files_have_the_same_presets():
    assert preset_names("finetuning") == preset_names("inference")


def test_the_batch_comments_are_true():
    """Each `# a micro × b accumulation × c dp = d` in finetuning.yml is what the preset does."""
    text = (DIRECTORY / "finetuning.yml").read_text()
    sums = re.findall(r"# (\d+) micro × (\d+) accumulation × (\d+) dp = (\d+)", text)
    names = preset_names("finetuning")
    assert len(sums) == len(names)
    for name, numbers in zip(names, sums, strict=True):
        config = config_of("finetuning", name)
        assert tuple(map(int, numbers)) == (
            config.execution.micro_batch_size,
            config.gradient_accumulation,
            config.execution.data_parallel,
            config.training.global_batch_size,
        ), name


# Published FLAN-T5 sizes: d_model, d_ff, num_heads, num_layers.
PUBLISHED = {
    "small": (512, 1024, 6, 8),
    "base": (768, 2048, 12, 12),
    "large": (1024, 2816, 16, 24),
    "xl_pod8": (2048, 5120, 32, 24),
    "xl_pod16": (2048, 5120, 32, 24),
    "xxl_pod16": (4096, 10240, 64, 24),
    "xxl_pod64": (4096, 10240, 64, 24),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name):
    model = load_config(T5Config, "finetuning", name).model
    assert PUBLISHED[name] == (
        model.hidden_size,
        model.d_ff,
        model.attention.heads,
        model.layers,
    )
    assert (model.attention.d_kv, model.embedding.vocab_size) == (64, 32128)


def test_defaults_that_t5_never_changed_are_hugging_faces():
    model, theirs = T5Config().model, HuggingFaceT5Config()
    attention = model.attention
    assert attention.relative_attention_num_buckets == theirs.relative_attention_num_buckets
    assert attention.relative_attention_max_distance == theirs.relative_attention_max_distance
    assert model.layer_norm_epsilon == theirs.layer_norm_epsilon


@pytest.mark.parametrize(
    ("name", "replicas"), [("tiny", 1), ("xl_pod8", 8), ("xl_pod16", 16), ("xxl_pod64", 64)]
)
def test_replicas(name, replicas):
    assert load_config(T5Config, "finetuning", name).num_replicas == replicas


def test_overrides_win():
    config = load_config(
        T5Config, "finetuning", "tiny", {"training": {"optimizer": {"beta1": 0.5}}}
    )
    assert config.training.optimizer.beta1 == 0.5
    assert config.training.optimizer.learning_rate.maximum == 1e-3


def test_a_written_configuration_is_read_back(tmp_path):
    config = load_config(T5Config, "finetuning", "xxl_pod64")
    path = tmp_path / "config.yml"
    path.write_text(yaml.safe_dump(config.to_dict()))
    assert load_config(T5Config, "finetuning", str(path)) == config


def test_inheritance_merges_field_by_field(presets):
    presets("far: {family: t5, model: {layers: 3, d_ff: 64}}", "other.yml")
    path = presets("near: {base: other/far, model: {layers: 4}}\nlast: {base: near}")
    assert load_preset(path, "last") == {"family": "t5", "model": {"layers": 4, "d_ff": 64}}


@pytest.mark.parametrize(
    ("over", "steps", "epochs"),
    [
        ({"steps": 3}, 3, None),
        ({"epochs": 2}, 500, 2),
        ({"steps": 3, "epochs": 2}, 3, None),
        ({"max_skipped_steps": 1}, 500, 4),
    ],
)
def test_steps_replace_epochs_of_what_they_override(over, steps, epochs):
    merged = merge_over({"training": {"steps": 500, "epochs": 4}}, {"training": over})["training"]
    assert (merged["steps"], merged["epochs"]) == (steps, epochs)


def test_merge_leaves_its_arguments_alone():
    base, over = {"a": {"b": 1}}, {"a": {"c": 2}, "d": 3}
    assert merge_over(base, over) == {"a": {"b": 1, "c": 2}, "d": 3}
    assert (base, over) == ({"a": {"b": 1}}, {"a": {"c": 2}, "d": 3})


@pytest.mark.parametrize(
    ("text", "preset", "message"),
    [
        ("one: {}", "onne", r"unknown preset 'onne' in some.yml; did you mean one\?"),
        ("one: {base: two}\ntwo: {base: one}", "one", "in a circle: one -> two -> one"),
        ("one: {base: two}", "one", "unknown preset 'two' in some.yml"),
        ("one: {base: nowhere/two}", "one", "cannot read .*nowhere.yml: No such file"),
        ("one: 3", "one", "preset 'one' of some.yml is 3, but must be a mapping"),
        ("one:\n  a: 1\n  a: 2", "one", "line 3: the key 'a' stands twice"),
        ("one: [", "one", "some.yml, line 1: "),
        ("- one", "one", "must hold a mapping, not list"),
    ],
)
def test_bad_files_are_named(presets, text, preset, message):
    with pytest.raises(ConfigError, match=message):
        load_preset(presets(text), preset)


def test_code_in_yaml_is_refused(presets):
    path = presets("one: !!python/object/apply:os.getcwd []")
    with pytest.raises(ConfigError, match="line 1"):
        load_preset(path, "one")


def test_a_family_is_needed():
    with pytest.raises(ConfigError, match="preset 'x' has the family None; there are: t5, bart"):
        config_class_of_preset({}, "x")


def test_a_file_of_presets_is_answered(tmp_path: Path) -> None:
    """Such as Graphcore's config/finetuning.yml, in place of one configuration."""
    file = tmp_path / "finetuning.yml"
    file.write_text("base: {}\ngptj_6B_1024_pod16:\n  model: {layers: 2}\n")
    with pytest.raises(ConfigError, match="line 2: gptj_6B_1024_pod16 is a preset: copy what"):
        load_preset("finetuning", str(file))


GRAPHCORES = """
model: {layers: 2, hidden_size: 32, sequence_length: 16, eval: false, dropout_prob: 0.1,
  precision: popxl.float16, seed: 42, embedding: {vocab_size: 50400}, %s}
training:
  steps: 10
  global_batch_size: 16
  stochastic_rounding: true
  optimizer: {name: AdamW, learning_rate: {%s maximum: 5e-6, warmup_proportion: 0.01}, beta1: 0.9,
    beta2: 0.999, weight_decay: 0.01, gradient_clipping: 1}
execution: {micro_batch_size: 4, data_parallel: 2, tensor_parallel: 1, device_iterations: 1,
  io_tiles: 1, available_memory_proportion: [0.4], loss_scaling: 1, attention_serialisation: 2,
  code_load: true}
checkpoint: {load: runs/old, save: runs/new}
"""


@pytest.mark.parametrize(
    ("family", "model", "rate"),
    [
        (
            "t5",
            "d_ff: 64, attention: {heads: 4, d_kv: 8, relative_attention_num_buckets: 32, "
            "relative_attention_max_distance: 128}",
            "",
        ),
        (
            "gptj",
            "attention: {heads: 4, rotary_dim: 8, rotary_positional_embeddings_base: 10000}",
            "function: linear,",
        ),
    ],
)
def test_graphcores_spellings_are_taken(family: str, model: str, rate: str, tmp_path: Path) -> None:
    """Every option that their documents list, with the values that they print."""
    file = tmp_path / "theirs.yml"
    file.write_text(f"family: {family}\n" + GRAPHCORES % (model, rate))
    data = load_preset("finetuning", str(file))
    config = config_class_of_preset(data, str(file)).from_dict(data)
    assert config.model.precision == "float16"
    assert config.training.optimizer.name == "adamw"
    assert config.training.optimizer.learning_rate.maximum == 5e-6
    assert config.execution.available_memory_proportion == 0.4
    assert config.gradient_accumulation == 2
