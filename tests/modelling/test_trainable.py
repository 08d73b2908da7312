"""Which weights `training.trainable` and `training.frozen` mean."""

from __future__ import annotations

from typing import Any

import pytest

from config.errors import ConfigError
from config.sections import RunConfig
from config.t5 import T5Config
from config.training import Training
from modelling.weights import WeightMap
from modelling.weights.trainable import mark_trainable, split_phases_by_trainable
from tests.modelling.gptj.hf import small_config
from tests.modelling.llama.hf import hf_config
from tests.modelling.llama.hf import our_config as llama_config
from tests.modelling.t5.training import our_config
from tests.modelling.weight_maps import base_weight_map as gptj_weight_map
from tests.modelling.weight_maps import base_weight_map as llama_weight_map
from tests.modelling.weight_maps import base_weight_map as t5_weight_map

GPTJ, T5 = gptj_weight_map(small_config()), t5_weight_map(our_config())


def trained(weight_map: WeightMap, **training: Any) -> set[str]:
    return {
        weight.name for weight in mark_trainable(weight_map, Training(**training)).trainable_weights
    }


def every(weight_map: WeightMap) -> set[str]:
    return {weight.name for weight in weight_map.weights}


@pytest.mark.parametrize("name", ["layer.1", "transformer.h.1", "layer.1*", "*.h.1.*"])
def test_a_layer_by_either_name(name: str) -> None:
    names = trained(GPTJ, trainable=name)
    assert names == {n for n in every(GPTJ) if n.startswith("transformer.h.1.")}
    assert len(names) == 10
    assert trained(GPTJ, frozen=name) == every(GPTJ) - names


def test_a_name_ends_at_a_dot() -> None:
    assert trained(GPTJ, trainable="lm_head") == {"lm_head.weight", "lm_head.bias"}
    assert trained(GPTJ, trainable="lm_head.b*") == {"lm_head.bias"}
    with pytest.raises(ConfigError, match="lm_hea matches no weight; did you mean lm_head"):
        trained(GPTJ, trainable="lm_hea")


def test_no_characters_but_the_star_are_special() -> None:
    for pattern in ("transformer.h.?", "transformer.h.[12]", "transformer/h", "transformer.h|"):
        with pytest.raises(ConfigError, match="matches no weight"):
            trained(GPTJ, frozen=pattern)


def test_many_stars_take_no_time() -> None:
    with pytest.raises(ConfigError, match="matches no weight"):
        trained(GPTJ, trainable="*r*" * 60 + "?")


def test_several_and_frozen_wins() -> None:
    names = trained(GPTJ, trainable="layer.1, lm_head", frozen="*.bias")
    assert names == {
        "lm_head.weight",
        *(f"transformer.h.1.attn.{n}_proj.weight" for n in ("q", "k", "v", "out")),
        *(f"transformer.h.1.{n}.weight" for n in ("ln_1", "mlp.fc_in", "mlp.fc_out")),
    }


def test_nothing_to_train_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing is left to train"):
        trained(GPTJ, trainable="layer.1", frozen="transformer")
    with pytest.raises(ConfigError, match="nothing is left to train"):
        trained(GPTJ, frozen="*")


def test_a_variable_is_one() -> None:
    """Weights that share a variable are all trained or none."""
    with pytest.raises(ConfigError, match=r"q_proj.weight trained and .*k_proj.weight frozen, but"):
        trained(GPTJ, trainable="*q_proj*")
    assert len(trained(GPTJ, trainable="*q_proj*,*k_proj*,*v_proj*")) == 9
    assert len(trained(GPTJ, trainable="layer.*.attn.qkv")) == 9


def test_names_in_files_that_are_joined() -> None:
    weight_map = llama_weight_map(llama_config(hf_config("phi3")))
    with pytest.raises(ConfigError, match="gate_proj.weight trained and .*up_proj.weight frozen"):
        trained(weight_map, trainable="*gate_proj*")
    names = trained(weight_map, trainable="model.layers.0.mlp.gate_up_proj")
    assert names == {f"model.layers.0.mlp.{n}_proj.weight" for n in ("gate", "up")}


def test_tied_weights_are_one() -> None:
    weight_map = llama_weight_map(llama_config(hf_config("llama")))
    assert "lm_head.weight" not in every(weight_map)
    for name in ("lm_head", "model.embed_tokens", "embeddings"):
        assert trained(weight_map, trainable=name) == {"model.embed_tokens.weight"}
    assert trained(T5, trainable="decoder.embed_tokens") == {"shared.weight"}


def test_layers_that_are_trained_alike_are_a_phase() -> None:
    weight_map = split_phases_by_trainable(
        mark_trainable(GPTJ, Training(trainable="layer.0,layer.2"))
    )
    assert {n: list(layers) for n, layers in weight_map.phases.items()} == {
        "embeddings": ["embeddings"],
        "layer": ["layer.0"],
        "layer_from_1": ["layer.1"],
        "layer_from_2": ["layer.2"],
        "head": ["head"],
    }
    assert weight_map.phase_splits["layer"] == ["layer", "layer_from_1", "layer_from_2"]
    weight_map = split_phases_by_trainable(mark_trainable(T5, Training(frozen="*norm*")))
    assert weight_map.phases == T5.phases
    weight_map = split_phases_by_trainable(mark_trainable(T5, Training(trainable="decoder.2")))
    assert weight_map.phases["decoder_block"] == ("decoder.1",)
    assert weight_map.phases["decoder_block_from_2"] == ("decoder.2",)


@pytest.mark.parametrize("text", ["", ",", "a,,b", "a, "])
def test_empty_names_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="must be names, separated by commas, or null"):
        Training(trainable=text)


def test_learned_scales_need_all_weights() -> None:
    found = our_config().to_dict()
    found["fp8"]["enabled"] = True
    config: RunConfig = T5Config.from_dict(found)
    found["training"]["frozen"] = "shared"
    with pytest.raises(ConfigError, match="set fp8.recipe current"):
        T5Config.from_dict(found)
    found["fp8"]["recipe"] = "current"
    assert T5Config.from_dict(found) != config
