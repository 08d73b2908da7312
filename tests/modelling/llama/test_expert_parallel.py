"""Whole experts on each of the tensor-parallel devices, in place of a part of each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from config.errors import ConfigError
from config.llama import LlamaConfig
from planning.requirements import finetuning_requirements
from tests.modelling.llama.hf import hf_config, hf_model, our_config, weights_of
from tests.modelling.llama.test_quantized_weights import base_of
from tests.modelling.llama.test_training import given_of
from tests.modelling.llama.training import batches, check_trained, trained
from tests.modelling.sessions import fine_tuning
from tests.modelling.weight_maps import base_weight_map
from tests.planning.presets import preset
from tests.slow import slow

WHOLE = {"execution.expert_parallel": True}
COUNT = {"mixtral": "num_local_experts", "gpt_oss": "num_local_experts"}


def mixture(kind: str) -> Any:
    """Hugging Face's description of a layer with experts that two and four devices can share."""
    return hf_config(kind, num_hidden_layers=1, **{COUNT.get(kind, "num_experts"): 4})


def sharing(kind: str, dp: int, tp: int) -> LlamaConfig:
    return our_config(mixture(kind), dp, tp, micro_batch=2).with_values(WHOLE)


@pytest.mark.parametrize(
    ("kind", "dp", "tp"),
    [
        ("gpt_oss", 2, 2),
        slow("qwen2_moe", 1, 4),
        slow("qwen3_moe", 2, 4),
        slow("mixtral", 1, 2),
    ],
)
def test_training_is_hugging_faces(kind: str, dp: int, tp: int) -> None:
    given = given_of(kind)
    check_trained(sharing(kind, dp, tp), *trained(mixture(kind), given), given)


@pytest.mark.slow
def test_state_goes_on_under_another_split_bit_for_bit() -> None:
    """Moments and weights are the logical ones, which any split holds."""
    config = sharing("qwen3_moe", 1, 2)
    model = fine_tuning(config)
    model.write(base_of(config, mixture("qwen3_moe")))
    with model:
        model.run([batches(1)[0]], [1e-2], 0)
        state = dict(model.read())
    for fields in ({"execution.expert_parallel": False}, {"execution.tensor_parallel": 4}):
        other = fine_tuning(config.with_values(fields))
        other.write(state)
        with other:
            found = dict(other.read())
        assert found.keys() == state.keys()
        assert all(np.array_equal(found[name], x) for name, x in state.items())


def test_plans_expect_balanced_experts() -> None:
    """The work of a device is its share, and so are the bytes."""
    config = preset(
        "qwen3_tiny",
        model={
            "model_type": "qwen3_moe",
            "num_hidden_layers": 1,
            "moe_intermediate_size": 256,
            "num_experts": 8,
            "num_experts_per_tok": 2,
        },
        execution={"tensor_parallel": 2},
    )
    cut, whole = (
        finetuning_requirements(config.with_values({"execution.expert_parallel": on})).plan
        for on in (False, True)
    )
    assert whole.flops == pytest.approx(cut.flops, rel=1e-3)
    assert whole.remote == cut.remote


def test_what_cannot_be_shared_is_refused() -> None:
    cases: list[tuple[LlamaConfig, dict[str, Any], str]] = [
        (our_config(hf_config("mixtral"), 1, 2), {}, "model.num_experts 5 must be divisible"),
        (our_config(hf_config("llama"), 1, 2), {}, "this one has none"),
        (
            our_config(mixture("qwen3_moe"), 1, 2),
            {"execution.expert_groups": 2},
            "exclude each other",
        ),
        (
            our_config(mixture("qwen3_moe"), 1, 2),
            {"training.optimizer.name": "adafactor"},
            "adafactor with execution.expert_parallel is not supported",
        ),
    ]
    for config, fields, said in cases:
        with pytest.raises(ConfigError, match=said):
            config.with_values(WHOLE | fields)


@pytest.mark.slow
def test_exports_are_those_of_any_split() -> None:
    hf_cfg = mixture("gpt_oss")
    start = weights_of(hf_model(hf_cfg))
    weight_map = base_weight_map(sharing("gpt_oss", 1, 2))
    model = fine_tuning(sharing("gpt_oss", 1, 2))
    model.write(weight_map.from_hf(start))
    with model:
        written = weight_map.to_hf(model.read(optimizer=False))
    assert written.keys() == start.keys()
    assert all(np.array_equal(written[name], x) for name, x in start.items())
