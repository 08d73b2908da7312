"""Random models of every architecture against Hugging Face's: training in any layout, writing,
folders in both directions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from config.llama import LlamaConfig
from huggingface.model_folders import read_hf_directory, write_hf_directory
from modelling.llama.config_json import ARCHITECTURES, MIXTURES, to_config_json
from sessions.generation import GenerationSession
from tests.modelling.generation.harness import hf_greedy
from tests.modelling.llama.hf import LENGTH, PAD, VOCABULARY, hf_model, our_config, weights_of
from tests.modelling.llama.random_configs import RandomConfig, random_config
from tests.modelling.llama.training import batches, check_trained, several_texts, trained
from tests.modelling.sessions import transposed
from tests.modelling.weight_maps import base_weight_map

PROMPTS, POSITIONS = 6, 5
RATE = 2e-3
"""At 1e-2, AdamW makes some draws so sensitive that rounding grows beyond the bounds."""
IN_BRIEF = (9,)


def config_of(drawn: RandomConfig, dp: int, tp: int, micro_batch: int, **model: Any) -> LlamaConfig:
    config = our_config(drawn.hf_cfg, dp, tp, micro_batch, drawn.slices, **model)
    execution = replace(config.execution, activations=drawn.activations)
    return transposed(replace(config, execution=execution), drawn.transposed)


def check_writing(drawn: RandomConfig, weights: dict[str, np.ndarray]) -> None:
    """Greedy tokens, where angles do not depend on the length of a text: ours go by the longest."""
    rng = np.random.default_rng(7)
    lengths = rng.integers(3, LENGTH + 1, PROMPTS)
    mask = (np.arange(LENGTH) < lengths[:, None]).astype(np.int32)
    input_ids = np.where(mask, rng.integers(3, VOCABULARY, mask.shape), PAD).astype(np.int32)
    batch = 4 if drawn.streamed else PROMPTS
    config = config_of(drawn, 1, drawn.tp, batch, eval=True, output_length=POSITIONS)
    where = "streamed" if drawn.streamed else "resident"
    generation = replace(config.generation, weights=where, micro_batches=2)
    with GenerationSession(replace(config, generation=generation)) as made:
        made.write(base_weight_map(config).from_hf(weights))
        tokens = made.generate(input_ids, mask)
    expected = hf_greedy(hf_model(drawn.hf_cfg), input_ids, mask, POSITIONS, PAD)
    np.testing.assert_array_equal(tokens, expected)


def check_folder(drawn: RandomConfig, weights: dict[str, np.ndarray], folder: Path) -> None:
    """Exports load in transformers, and read back bit for bit."""
    config = our_config(drawn.hf_cfg)
    weight_map = base_weight_map(config)
    write_hf_directory(
        folder, weight_map.to_hf(weight_map.from_hf(weights)), to_config_json(config)
    )
    loaded = getattr(transformers, ARCHITECTURES[drawn.hf_cfg.model_type].cls).from_pretrained(
        folder
    )
    found = weights_of(loaded)
    assert found.keys() == weights.keys()
    assert all(np.array_equal(found[n], x) for n, x in weights.items())
    assert our_config(loaded.config) == config
    again = weight_map.from_hf(read_hf_directory(folder))
    assert all(np.array_equal(again[n], x) for n, x in weight_map.from_hf(weights).items())


def check(drawn: RandomConfig, folder: Path) -> None:
    given = [several_texts(5), *batches(1), several_texts(6)] if drawn.texts else batches(3)
    start, expected = trained(drawn.hf_cfg, given, RATE)
    config = config_of(drawn, drawn.dp, drawn.tp, drawn.micro_batch)
    check_trained(config, start, expected, given, RATE)
    if drawn.texts:
        check_writing(drawn, start)
    check_folder(drawn, start, folder / "hf")


@pytest.mark.parametrize("seed", IN_BRIEF)
def test_a_drawn_model_is_hugging_faces(seed: int, tmp_path: Path) -> None:
    check(random_config(seed), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [n for n in range(100) if n not in IN_BRIEF])
def test_hundred_drawn_models_are_hugging_faces(seed: int, tmp_path: Path) -> None:
    check(random_config(seed), tmp_path)


@pytest.mark.parametrize("seed", range(len(MIXTURES)))
def test_folders_of_drawn_mixtures_of_experts(seed: int, tmp_path: Path) -> None:
    drawn = random_config(seed, MIXTURES)
    check_folder(drawn, weights_of(hf_model(drawn.hf_cfg)), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
def test_hundred_drawn_mixtures_are_hugging_faces(seed: int, tmp_path: Path) -> None:
    check(random_config(seed, MIXTURES), tmp_path)
