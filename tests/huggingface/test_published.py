"""Folders of models as others published them: each loads as transformers loads it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.core_model_loading import revert_weight_conversion

import huggingface.convert
from config.errors import ConfigError
from config.families import FAMILIES
from config.sections import RunConfig
from huggingface.multimodal import multimodal_type, text_tensor_name
from modelling.model_family import get_family
from planning.config_loader import CONFIG_LOADER
from run.model_weights import read_weights
from sessions.loss_evaluation import LossSession
from tests.huggingface.published import (
    OTHERS,
    class_of,
    extra_tensors,
    facts,
    forms,
    make_folder,
)
from tests.modelling.torch_training import named_by_hf
from tests.slow import slow


def described(folder: Path) -> RunConfig:
    """The configuration of a run that begins with the model in a folder."""
    found = dict(CONFIG_LOADER.from_model(str(folder)))
    layerdrop = {name: 0.0 for name in found["model"] if name.endswith("layerdrop")}
    found["model"] |= layerdrop  # which training refuses
    size = {"training": {"global_batch_size": 1}}
    return FAMILIES[found["family"]].config.from_dict(found | size)


def ours(folder: Path) -> dict[str, np.ndarray]:
    """The weights in a folder as we read them, float32, by the names that an export gives them."""
    config = described(folder)
    weight_map = get_family(config).weight_map(config)
    weights, _ = read_weights(config, weight_map, str(folder))
    files = weight_map.to_hf(weights)
    return {name: files[name].astype(np.float32) for name in files}


def theirs(folder: Path) -> dict[str, np.ndarray]:
    """Those that transformers has, of a model of texts and images the text part's."""
    model = class_of(folder).from_pretrained(folder, dtype=torch.float32)
    # Experts that were dequantized as they were read have no way back to the files' names.
    given = model.config.model_type == "gpt_oss"
    tensors = model.state_dict() if given else revert_weight_conversion(model, model.state_dict())
    if multimodal_type(model.config.to_dict()):
        tensors = {text_tensor_name(name) or name: value for name, value in tensors.items()}
    found = {name: value.numpy() for name, value in tensors.items()}
    return {n: x for n, x in found.items() if not n.startswith(("vision_tower", "multi_modal"))}


TABLES = {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight"}
COPIES = {"lm_head.weight", *TABLES, *(f"model.{name}" for name in TABLES)}
"""Names that transformers has besides for a tied embedding."""


@pytest.mark.parametrize(
    "name", [name for first, *more in forms().values() for name in (first, *map(slow, more))]
)
def test_a_published_model_loads(name: str, tmp_path: Path) -> None:
    make_folder(name, tmp_path)
    found, expected = ours(tmp_path), theirs(tmp_path)
    assert expected.keys() - found.keys() <= COPIES
    for weight, value in found.items():
        np.testing.assert_array_equal(value, expected[weight], weight)


@pytest.mark.parametrize("name", OTHERS)
def test_other_kinds_are_refused_by_their_kind(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(facts()[name]["config"]))
    kind = facts()[name]["config"]["model_type"]
    said = f"is of the kind '{kind}', .*, which is not there; there are: t5, "
    with pytest.raises(ConfigError, match=said):
        described(tmp_path)


EXTRA = ("EleutherAI/gpt-j-6b", "google-t5/t5-base", "decapoda-research/llama-7b-hf (LLaMA 1)")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.float64])
@pytest.mark.parametrize("name", EXTRA)
def test_what_is_no_weight_is_passed_over_whatever_it_is(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Types that no weight has, shapes that no part of the model has, and no number."""
    tensors = make_folder(name, tmp_path)
    extras = extra_tensors(name, json.loads((tmp_path / "config.json").read_text()))
    odd = {n: torch.full((3, 5), float("nan")).to(dtype) for n in extras}
    expected = ours(tmp_path)
    save_file(tensors | odd, tmp_path / "model.safetensors")
    found = ours(tmp_path)
    assert expected.keys() == found.keys()
    assert all(np.array_equal(found[n], x) for n, x in expected.items())


@pytest.mark.parametrize("name", EXTRA)
def test_bin_files_are_converted_without_what_is_no_weight(name: str, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    tensors = make_folder(name, old)
    expected = ours(old)
    (old / "model.safetensors").unlink()
    torch.save(tensors, old / "pytorch_model.bin")
    assert huggingface.convert.main([str(old), str(new)]) == 0
    extras = extra_tensors(name, json.loads((old / "config.json").read_text()))
    assert set(load_file(new / "model.safetensors")) == tensors.keys() - extras.keys()
    found = ours(new)
    assert all(np.array_equal(found[n], x) for n, x in expected.items())


LENGTHS = {"sequence_length": 12}
ODD = (
    "EleutherAI/gpt-j-6b",
    slow("google-t5/t5-base"),
    slow("google/byt5-small"),
    slow("google/gemma-2-9b-it"),
    slow("microsoft/Phi-3-mini-128k-instruct"),
    slow("microsoft/Phi-4-mini-instruct"),
    slow("meta-llama/Llama-2-7b-hf"),
    slow("openai/gpt-oss-20b"),
)


@pytest.mark.parametrize("name", ODD)
def test_the_loss_of_a_published_model_is_transformers(name: str, tmp_path: Path) -> None:
    make_folder(name, tmp_path)
    config = described(tmp_path)
    lengths = LENGTHS | ({"decoder_sequence_length": 6} if config.family == "t5" else {})
    config = replace(config, model=replace(config.model, **lengths))
    family = get_family(config)
    samples = family.sample_format.make_random_samples(config, 3, None)
    with LossSession(config) as model:
        model.write(read_weights(config, family.weight_map(config), str(tmp_path))[0])
        found = model.compute(samples).mean
    theirs = class_of(tmp_path).from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    batch = {n: torch.tensor(x).long() for n, x in samples.take(np.arange(3)).items()}
    inputs = {n: x for n, x in named_by_hf(batch).items() if n != "labels"}
    if config.family != "t5":  # whose labels are those of the next tokens
        inputs = {"input_ids": batch["input_ids"]}
    with torch.no_grad():
        logits = theirs.eval()(**inputs).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    np.testing.assert_allclose(found, expected.item(), rtol=2e-5)
