"""Where a run starts: what is read, when, and what is said of what cannot be."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from checkpoints import (
    CheckpointError,
    CheckpointStore,
    CheckpointWarning,
    DamagedCheckpointError,
    TensorFiles,
)
from checkpoints.safetensors_files import StoredTensor
from config.errors import UserError
from config.families import config_class_of_preset
from config.presets import load_config, load_preset, preset_names
from config.sections import RunConfig
from huggingface.model_folders import write_hf_directory
from modelling.model_family import get_family
from run.resume import resolve_initial_state
from run.weight_loading import load_weights

SMALL = {"layers": 1, "hidden_size": 8, "d_ff": 8, "attention": {"heads": 2, "d_kv": 4}}


def config_of(preset: str, load: str | None, model: dict | None = None) -> RunConfig:
    config_class = config_class_of_preset(load_preset("finetuning", preset), preset)
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
    weight_map = get_family(config).weight_map(config)
    start = resolve_initial_state(config, weight_map)
    assert (start.step, start.source) == (0, "random weights")
    assert np.array_equal(
        start.tensors["shared.weight"], weight_map.init_weights(42)["shared.weight"]
    )
    with pytest.raises(UserError, match="there are no weights: give --load DIR"):
        load_weights(config, weight_map)


def test_a_folder_may_be_called_random(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    config = config_of("tiny", "./random", SMALL)
    weight_map = get_family(config).weight_map(config)
    write_hf_directory(
        "random", weight_map.init_weights(7), get_family(config).to_config_json(config)
    )
    assert resolve_initial_state(config, weight_map).source == "./random"


@pytest.mark.parametrize("kind", ["checkpoint", "Hugging Face"])
@pytest.mark.parametrize("start", [resolve_initial_state, load_weights])
def test_tensors_are_read_when_they_are_asked_for(kind, start, tmp_path, reads):
    config = config_of("tiny", str(tmp_path / "saved"), SMALL)
    weight_map = get_family(config).weight_map(config)
    if kind == "checkpoint":
        slots = ("first_order", "second_order")
        state = {
            f"optimizer/{s}/{w.name}": np.zeros(w.shape) for w in weight_map.weights for s in slots
        }
        with CheckpointStore(tmp_path / "saved") as store:
            store.save(3, {**weight_map.init_weights(7), **state}, {}, wait=True)
    else:
        write_hf_directory(tmp_path / "saved", weight_map.init_weights(7), {})
    tensors = start(config, weight_map).tensors
    assert not reads
    name = "decoder.final_layer_norm.weight"
    assert np.array_equal(tensors[name], np.ones(8))
    assert reads == [name]
    has_state = kind == "checkpoint" and start is resolve_initial_state
    assert len(tensors) == len(weight_map.weights) * (3 if has_state else 1)


@pytest.fixture
def steps(tmp_path) -> RunConfig:
    """Steps 1, 2 and 3, each with weights of its own, and a configuration that loads them."""
    config = config_of("tiny", str(tmp_path / "saved"), SMALL)
    weight_map = get_family(config).weight_map(config)
    with CheckpointStore(tmp_path / "saved") as store:
        for step in (1, 2, 3):
            store.save(step, dict(weight_map.init_weights(step)), {}, wait=True)
    return config


def spoil(config: RunConfig, step: int) -> None:
    (file,) = Path(str(config.checkpoint.load)).glob(f"*-step-{step}/*.safetensors")
    content = bytearray(file.read_bytes())
    content[-3] ^= 8
    file.write_bytes(content)


def read_weights(config: RunConfig) -> tuple[int, dict[str, np.ndarray]]:
    weight_map = get_family(config).weight_map(config)
    start, found = load_weights(config, weight_map).load_with_fallback(
        lambda one: dict(one.tensors)
    )
    return start.step, found


def test_values_are_read_once(steps, monkeypatch):
    sizes: list[int] = []
    read = StoredTensor.read_into
    monkeypatch.setattr(
        StoredTensor, "read_into", lambda *args: sizes.append(len(args[1])) or read(*args)
    )
    step, weights = read_weights(steps)
    assert (step, sum(sizes)) == (3, sum(array.nbytes for array in weights.values()))


def test_damage_that_is_found_as_values_are_read_leads_to_the_step_before(steps):
    for step in (3, 2):
        spoil(steps, step)
    with pytest.warns(CheckpointWarning) as warned:
        step, weights = read_weights(steps)
    assert step == 1
    said = str(warned[-1].message)
    assert re.fullmatch(
        r"the checkpoint of step 3 is damaged \(tensor .* is not what was saved\); "
        r"the checkpoint of step 2 is damaged \(.* not what was saved\); using that of step 1",
        said,
    )
    weight_map = get_family(steps).weight_map(steps)
    assert all(np.array_equal(weights[name], a) for name, a in weight_map.init_weights(1).items())
    # They do not push out the good one.
    with CheckpointStore(str(steps.checkpoint.load), to_keep=2) as store:
        store.save(4, {}, {}, wait=True)
        assert store.steps() == [1, 2, 3, 4]


def test_a_damaged_step_that_was_named_is_not_replaced(steps):
    spoil(steps, 3)
    (folder,) = Path(str(steps.checkpoint.load)).glob("*-step-3")
    named = replace(steps, checkpoint=replace(steps.checkpoint, load=str(folder)))
    with pytest.raises(CheckpointError, match="is not what was saved"):
        read_weights(named)


def test_no_step_is_good(steps):
    for step in (1, 2, 3):
        spoil(steps, step)
    with pytest.warns(CheckpointWarning), pytest.raises(CheckpointError) as error:
        read_weights(steps)
    assert str(error.value).count("is damaged") == 3


def test_a_damaged_file_of_a_model_has_no_step_before(steps, tmp_path, monkeypatch):
    weight_map = get_family(steps).weight_map(steps)
    write_hf_directory(tmp_path / "hf", weight_map.init_weights(7), {})
    monkeypatch.setattr(StoredTensor, "read_into", _fails)
    with pytest.raises(DamagedCheckpointError, match="no such device"):
        read_weights(replace(steps, checkpoint=replace(steps.checkpoint, load=f"{tmp_path}/hf")))


def _fails(*_: object) -> None:
    raise DamagedCheckpointError("no such device")


def pretrained() -> list[str]:
    """Presets of published models: all but those for trying things out."""
    return [
        name
        for name in preset_names("finetuning")
        if not re.search("tiny|gptj_small|llama_small", name)
    ]


HUB = {
    "bart_base": "facebook/bart-base",
    "bart_large_cnn": "facebook/bart-large-cnn",
    "bart_large": "facebook/bart-large",
    "byt5_base": "google/byt5-base",
    "byt5_xl": "google/byt5-xl",
    "byt5_xxl": "google/byt5-xxl",
    "flan_ul2": "google/flan-ul2",
    "gpt_oss_20b": "openai/gpt-oss-20b",
    "gptj_6B": "EleutherAI/gpt-j-6b",
    "marian_en_de": "Helsinki-NLP/opus-mt-en-de",
    "mbart_large_50": "facebook/mbart-large-50",
    "nllb_1_3B": "facebook/nllb-200-1.3B",
    "nllb_3_3B": "facebook/nllb-200-3.3B",
    "nllb_600M": "facebook/nllb-200-distilled-600M",
    "pegasus_large": "google/pegasus-large",
    "llama3_1_8B": "meta-llama/Llama-3.1-8B",
    "llama3_2_1B": "meta-llama/Llama-3.2-1B",
    "qwen3_0_6B": "Qwen/Qwen3-0.6B",
    "qwen3_30B_A3B": "Qwen/Qwen3-30B-A3B",
    "qwen3_32B": "Qwen/Qwen3-32B",
    "umt5_base": "google/umt5-base",
    "umt5_xl": "google/umt5-xl",
    "umt5_xxl": "google/umt5-xxl",
    "t5gemma2_270m_270m": "google/t5gemma-2-270m-270m",
    "t5gemma2_1b_1b": "google/t5gemma-2-1b-1b",
    "t5gemma2_4b_4b": "google/t5gemma-2-4b-4b",
    "t5gemma_2b_2b": "google/t5gemma-2b-2b-prefixlm",
    "t5gemma_9b_2b": "google/t5gemma-9b-2b-prefixlm",
    "t5gemma_9b_9b": "google/t5gemma-9b-9b-prefixlm",
}


def test_presets_of_published_models_start_from_their_weights():
    for name in pretrained():
        config_class = config_class_of_preset(load_preset("finetuning", name), name)
        config = load_config(config_class, "finetuning", name)
        flan = f"google/flan-t5-{name.partition('_')[0]}"
        expected = next((hub for model, hub in HUB.items() if name.startswith(model)), flan)
        assert config.checkpoint.load == expected


def test_without_the_hub_one_sentence_says_what_to_do():
    config = config_of("small", "google/flan-t5-small")
    with pytest.raises(UserError, match="no such folder here, .* connect to the network and"):
        resolve_initial_state(config, get_family(config).weight_map(config))
