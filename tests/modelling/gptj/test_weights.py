"""GPT-J's weights: Hugging Face's names, shapes and initial values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

from files.json_files import JsonObject
from modelling.gptj.config_json import from_config_json, to_config_json
from tests.modelling.gptj.hf import small_config
from tests.modelling.harness import TENSOR_PARALLEL
from tests.modelling.weight_maps import base_weight_map


def hf_weights(config) -> dict[str, np.ndarray]:
    """A new Hugging Face model's weights."""
    torch.manual_seed(0)
    model = transformers.GPTJForCausalLM(transformers.GPTJConfig(**to_config_json(config)))
    return {name: x.numpy() for name, x in model.state_dict().items()}


@pytest.mark.parametrize("tensor_parallel", TENSOR_PARALLEL)
def test_every_weight_is_used_once_and_comes_back(tensor_parallel):
    config = small_config(tp=tensor_parallel)
    weight_map, weights = base_weight_map(config), hf_weights(config)
    logical = weight_map.from_hf(weights)
    back: dict[str, np.ndarray] = {}
    for rows in weight_map.layers.values():
        for row in rows:
            found = row.to_logical_weights(
                row.to_variable_data(logical, tensor_parallel), tensor_parallel
            )
            assert not found.keys() & back.keys()
            back.update(found)
    assert back.keys() == weights.keys()
    assert all(np.array_equal(back[name], weights[name]) for name in back)


def test_an_export_keeps_the_positions_of_its_base():
    """transformers' GPT-J has a table of them, and fails beyond its end."""
    described = to_config_json(small_config()) | {"n_positions": 4096}
    read = from_config_json(JsonObject(described, "config.json"))
    assert (
        to_config_json(small_config(max_position_embeddings=read["max_position_embeddings"]))[
            "n_positions"
        ]
        == 4096
    )


def test_initial_values_are_distributed_as_hugging_faces():
    config = small_config(hidden_size=64, initializer_range=0.05, embedding={"vocab_size": 256})
    ours, weights = base_weight_map(config).init_weights(1), hf_weights(config)
    for name, array in ours.items():
        expected = weights[name]
        assert array.shape == expected.shape
        if expected.std() == 0:
            np.testing.assert_array_equal(array, expected)
        else:
            tolerance = 5 / np.sqrt(array.size)
            assert abs(array.std() / expected.std() - 1) < tolerance, name
            assert abs(array.mean()) < tolerance * array.std(), name
