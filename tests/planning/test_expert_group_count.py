"""Into how many groups plans cut a layer's experts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from config.sections import RunConfig
from planning.expert_group_count import (
    active_expert_bytes,
    min_expert_groups,
    next_expert_group_count,
)
from planning.fit_search import plan_best_training
from planning.hardware.machines import machine
from planning.requirements import finetuning_requirements
from tests.planning.presets import preset

MB = 1e6


def mixture(groups: int = 1, **model: object) -> RunConfig:
    return preset(
        "qwen3_tiny",
        model={
            "model_type": "qwen3_moe",
            "num_hidden_layers": 1,
            "moe_intermediate_size": 1024,
            "num_experts": 12,
            "num_experts_per_tok": 2,
            **model,
        },
        training={"global_batch_size": 4},
        execution={"micro_batch_size": 4, "expert_groups": groups},
    )


@pytest.mark.parametrize(("memory", "groups"), [(1000, 1), (300, 2), (80, 4), (70, 6), (1, 12)])
def test_as_few_as_take_a_quarter_of_the_memory(memory: float, groups: int) -> None:
    assert (
        min_expert_groups(mixture(), memory * MB)
        == min_expert_groups(mixture(3), memory * MB)
        == groups
    )


def test_what_cannot_be_cut_is_one_group() -> None:
    for config in (preset("qwen3_tiny"), preset("tiny"), mixture(dropout_prob=0.1)):
        assert (min_expert_groups(config, 1), next_expert_group_count(config)) == (1, None)
    assert [next_expert_group_count(mixture(n)) for n in (1, 2, 4, 6, 12)] == [2, 4, 12, 12, None]


def test_what_a_group_takes_is_what_plans_say() -> None:
    """It and its gradient and moments are most of what is on the device at a time, but not all."""
    for groups in (1, 4):
        config = mixture(groups)
        there = finetuning_requirements(config, "gpu").plan.device_bytes
        assert 0.5 * there < active_expert_bytes(config) < 1.3 * there


def test_experts_are_cut_before_micro_batches_are() -> None:
    small = replace(machine("rtx4090"), memory=60 * MB)
    config = mixture().with_values({"execution.activations": "recompute"})
    made = plan_best_training("a mixture", [config], small)
    execution = made.requirements.config.execution
    assert made.fits
    assert execution.expert_groups > 1
    assert execution.micro_batch_size == 4
