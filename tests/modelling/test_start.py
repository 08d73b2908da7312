"""Where a run starts: what is read, when, and what is said of what cannot be."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from checkpoints import CheckpointStore, TensorFiles
from config.errors import UserError
from config.families import config_class_of
from config.presets import load_config, preset_data, preset_names
from config.sections import RunConfig
from huggingface.folders import write_hf_directory
from modelling.spec import family_of
from modelling.start import load_weights, starting_point

SMALL = {"layers": 1, "hidden_size": 8, "d_ff": 8, "attention": {"heads": 2, "d_kv": 4}}


def config_of(preset: str, load: str | None, model: dict | None = None) -> RunConfig:
    config_class = config_class_of(preset_data("finetuning", preset), preset)
    config = load_config(config_class, "finetuning", preset, {"model": model or {}})
    return replace(config, checkpoint=replace(config.checkpoint, load=load))


@pytest.fixture
def reads(monkeypatch) -> list[str]:
    """Names of the tensors that were read from files."""
    names: list[str] = []
    read = TensorFiles.__getitem__
    monkeypatch.setattr(
        TensorFiles, "__getitem__", lambda self, name: names.append(name) or read(self, name)
    )
    return names


@pytest.mark.parametrize("load", [None, "random"])
def test_random_weights(load, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    config = config_of("tiny", load)
    table = family_of(config).weights(config)
    start = starting_point(config, table)
    assert (start.step, start.source) == (0, "random weights")
    assert np.array_equal(start.tensors["shared.weight"], table.initial(42)["shared.weight"])
    with pytest.raises(UserError, match="there are no weights: give --load DIR"):
        load_weights(config, table)


def test_a_folder_may_be_called_random(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    config = config_of("tiny", "./random", SMALL)
    table = family_of(config).weights(config)
    write_hf_directory("random", table.initial(7), family_of(config).to_config_json(config))
    assert starting_point(config, table).source == "./random"


@pytest.mark.parametrize("kind", ["checkpoint", "Hugging Face"])
@pytest.mark.parametrize("start", [starting_point, load_weights])
def test_tensors_are_read_when_they_are_asked_for(kind, start, tmp_path, reads):
    config = config_of("tiny", str(tmp_path / "saved"), SMALL)
    table = family_of(config).weights(config)
    if kind == "checkpoint":
        slots = ("first_order", "second_order")
        state = {f"optimizer/{s}/{w.name}": np.zeros(w.shape) for w in table.weights for s in slots}
        with CheckpointStore(tmp_path / "saved") as store:
            store.save(3, {**table.initial(7), **state}, {}, wait=True)
    else:
        write_hf_directory(tmp_path / "saved", table.initial(7), {})
    tensors = start(config, table).tensors
    reads.clear()  # of verifying
    name = "decoder.final_layer_norm.weight"
    assert np.array_equal(tensors[name], np.ones(8))
    assert reads == [name]
    has_state = kind == "checkpoint" and start is starting_point
    assert len(tensors) == len(table.weights) * (3 if has_state else 1)


def pretrained() -> list[str]:
    """Presets of published models: all but those for trying things out."""
    return [
        name
        for name in preset_names("finetuning")
        if not re.search("tiny|gptj_small|llama_small", name)
    ]


HUB = {
    "gptj_6B": "EleutherAI/gpt-j-6b",
    "llama3_1_8B": "meta-llama/Llama-3.1-8B",
    "llama3_2_1B": "meta-llama/Llama-3.2-1B",
    "qwen3_0_6B": "Qwen/Qwen3-0.6B",
    "qwen3_32B": "Qwen/Qwen3-32B",
}


def test_presets_of_published_models_start_from_their_weights():
    for name in pretrained():
        config_class = config_class_of(preset_data("finetuning", name), name)
        config = load_config(config_class, "finetuning", name)
        flan = f"google/flan-t5-{name.partition('_')[0]}"
        expected = next((hub for model, hub in HUB.items() if name.startswith(model)), flan)
        assert config.checkpoint.load == expected


def test_without_the_hub_one_sentence_says_what_to_do():
    config = config_of("small", "google/flan-t5-small")
    with pytest.raises(UserError, match="check the path, or connect to the network"):
        starting_point(config, family_of(config).weights(config))
