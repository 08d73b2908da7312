"""Experts that pass the device a group at a time (`execution.expert_groups`), against transformers,
and against layers that are whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import popxl
from config.errors import ConfigError
from modelling.model_family import get_family
from modelling.phases.evaluation import build_loss_program
from modelling.phases.training import build_training_program
from sessions.generation import GenerationSession
from sessions.loss_evaluation import LossSession
from sessions.training import TrainingSession
from tests.modelling.generation.harness import hf_greedy
from tests.modelling.llama.hf import (
    LENGTH,
    PAD,
    VOCABULARY,
    as_parameters,
    hf_config,
    hf_model,
    our_config,
    weights_of,
)
from tests.modelling.llama.test_balance import balanced, trained_balanced
from tests.modelling.llama.training import (
    RATE,
    batches,
    check_trained,
    several_texts,
    trained,
)
from tests.modelling.sessions import check_continuing, fine_tuning
from tests.modelling.t5.training import our_config as t5_config
from tests.modelling.torch_training import check_training
from tests.modelling.weight_maps import base_weight_map
from tests.slow import slow

STEPS = 3


def grouped(kind: str, groups: int, *split: Any, **execution: Any) -> Any:
    config = our_config(hf_config(kind), *split)
    return with_groups(config, groups, **execution)


def with_groups(config: Any, groups: int, **execution: Any) -> Any:
    return replace(config, execution=replace(config.execution, expert_groups=groups, **execution))


# ---- training -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("kind", "groups", "dp", "tp", "execution"),
    [
        slow("qwen2_moe", 3, 2, 2, {"activations": "keep"}),
        slow("qwen2_moe", 6, 1, 2, {"update": "deferred"}),
        slow("gpt_oss", 2, 1, 2, {"activations": "keep"}),
        slow("mixtral", 5, 1, 1, {"activations": "keep"}),
        slow("olmoe", 7, 2, 1, {"transpose_batch_sequence": True}),
        slow("qwen3_moe", 2, 1, 1, {"rts_activations": False}),
        slow("qwen3_moe", 8, 1, 4, {"resident_layers": 1}),
    ],
)
def test_loss_every_gradient_and_three_steps_of_adamw(
    kind: str, groups: int, dp: int, tp: int, execution: dict[str, Any]
) -> None:
    given = [several_texts(5), *batches(STEPS - 1)]
    config = grouped(kind, groups, dp, tp, 2, **execution)
    check_trained(config, *trained(hf_config(kind), given), given)


@pytest.mark.parametrize(
    ("kind", "groups", "tp", "activations"),
    [
        ("gpt_oss", 2, 2, "keep"),
        slow("qwen3_moe", 8, 1, "recompute"),
        slow("qwen2_moe", 2, 2, "keep"),
    ],
)
def test_training_with_balance(kind: str, groups: int, tp: int, activations: str) -> None:
    alike = {"layer_types": ["full_attention"] * 2} if kind == "gpt_oss" else {}
    hf_cfg, given = balanced(kind, num_hidden_layers=2, **alike), batches(STEPS)
    config = with_groups(our_config(hf_cfg, 1, tp, 2), groups, activations=activations)
    check_trained(config, *trained_balanced(hf_cfg, given, 2), given)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("told", "only"),
    [
        ({"trainable": "layer.1.feed_forward,layer.2.attention"},
         r"layers\.1\.mlp|layers\.2\.self_attn\.(q_|k_|v_|o_)"),
        ({"trainable": "*.mlp.experts"}, r"mlp\.experts"),
        ({"frozen": "*.mlp.experts"}, r"^(?!.*mlp\.experts)"),
        ({"trainable": "layer.0,layer.2"}, r"layers\.[02]"),
    ],
)  # fmt: skip
def test_some_are_trained_as_in_torch(told: dict[str, str], only: str) -> None:
    """Experts and what is before and after them, each with the other frozen."""
    start, expected = trained(hf_config("qwen2_moe"), batches(STEPS), only=only)
    config = grouped("qwen2_moe", 3, 1, 1, 2)
    config = config.with_values({f"training.{name}": value for name, value in told.items()})
    weight_map = get_family(config).weight_map(config)
    model = fine_tuning(config, gradients=True)
    model.write(weight_map.from_hf(start))

    frozen = dict(weight_map.from_hf(start))

    def named(ours: Any) -> Any:
        whole = as_parameters(weight_map, {**frozen, **ours})
        return whole if len(ours) == len(frozen) else {n: whole[n] for n in expected.gradients}

    weights = check_training(model, batches(STEPS), expected, RATE, named)
    for name in start.keys() - expected.gradients.keys():
        np.testing.assert_array_equal(weights[name], start[name], err_msg=name)


def test_one_layers_experts_are_trained_alike() -> None:
    config = grouped("qwen2_moe", 3)
    frozen = ",".join(f"model.layers.1.mlp.experts.{n}" for n in (2, 3))
    config = config.with_values({"training.frozen": frozen})
    with pytest.raises(ConfigError, match="experts of layer"):
        get_family(config).weight_map(config)


# ---- bits ---------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.optimised
def test_kept_is_computed_again_and_killed_is_continued_bit_for_bit() -> None:
    """Also with other groups, but for rounding. The more there are, the less device memory XLA says
    that programs take."""
    given = batches(4)
    hf_cfg = hf_config("qwen3_moe", num_hidden_layers=2, moe_intermediate_size=96)

    def model_of(groups: int, activations: str) -> TrainingSession:
        return fine_tuning(with_groups(our_config(hf_cfg), groups, activations=activations))

    def train(model: TrainingSession, start: int, stop: int) -> None:
        for step in range(start, stop):
            model.run([given[step]], [RATE], step)

    kept = model_of(4, "keep")
    half = check_continuing(kept, base_weight_map(kept.config).init_weights(0), train)
    found, taken = [], []
    for groups, activations in ((4, "keep"), (4, "recompute"), (2, "keep"), (1, "keep")):
        model = model_of(groups, activations)
        taken.append(model.session.memory_use().temporaries)
        model.write(half)
        with model:
            train(model, 2, 4)
            found.append(dict(model.read()))
    assert taken[0] < 0.8 * taken[2] < 0.8 * 0.8 * taken[3]
    bits, *others = found
    assert all(found.keys() == bits.keys() for found in others)
    for name, array in bits.items():
        np.testing.assert_array_equal(others[0][name], array, err_msg=name)
        for other in others[1:]:
            np.testing.assert_allclose(other[name], array, rtol=1e-3, atol=1e-5, err_msg=name)


# ---- without training ---------------------------------------------------------------------------
@pytest.mark.slow
def test_evaluation_and_generation_read_what_is_trained() -> None:
    """Without a copy: tokens are transformers', the loss that of whole layers."""
    hf_cfg = hf_config("qwen2_moe", num_hidden_layers=2)
    start = weights_of(hf_model(hf_cfg))
    rng = np.random.default_rng(7)
    input_ids = rng.integers(3, VOCABULARY, (8, LENGTH), np.int32)
    mask = np.ones_like(input_ids)
    losses = []
    for groups in (1, 3):
        config = with_groups(our_config(hf_cfg), groups)
        config = replace(config, generation=replace(config.generation, weights="streamed"))
        family = get_family(config)
        samples = family.sample_format.make_random_samples(config, 16, None)
        model = TrainingSession(config)
        model.write(base_weight_map(config).from_hf(start))
        with model:
            for borrower in (LossSession(config, model), GenerationSession(config, None, model)):
                borrower.write(model.tensors(optimizer=False))
                with borrower:
                    assert borrower.session.remote_bytes() == 0
                    if isinstance(borrower, LossSession):
                        losses.append(borrower.compute(samples).total)
                    else:
                        tokens = borrower.generate(input_ids, mask)
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    np.testing.assert_array_equal(tokens, hf_greedy(hf_model(hf_cfg), input_ids, mask, 5, PAD))


# ---- plans --------------------------------------------------------------------------------------
def test_device_memory_falls_with_groups_and_work_does_not_grow() -> None:
    """By most of the experts' weights and gradients, of which a group is there. Plans take it that
    all experts are chosen alike."""
    hf_cfg = hf_config("qwen3_moe", moe_intermediate_size=256, num_hidden_layers=1)
    at_once = 4 * 3 * 256 * 32 * 8  # the weights of a layer's experts
    needed: dict[tuple[int, bool], int] = {}
    flops = set()
    for groups in (1, 4):
        config = with_groups(our_config(hf_cfg, micro_batch=2), groups)
        for trains in (True, False):
            given = replace(config, model=replace(config.model, eval=not trains))
            build, family = (
                build_training_program if trains else build_loss_program,
                get_family(given),
            )
            program = build(given, family.build_phases, weight_map=family.weight_map(given))
            plan = popxl.plan.trace_program(program.ir, "gpu").plan()
            needed[groups, trains] = plan.device_bytes
            flops |= {plan.flops} if trains else set()
    gone = at_once * (1 - 1 / 4)
    assert needed[1, False] - needed[4, False] > 0.8 * gone
    assert needed[1, True] - needed[4, True] > 0.8 * 2 * gone
    assert max(flops) < 1.01 * min(flops)


# ---- refused ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("config", "changed", "message"),
    [
        (our_config(hf_config("qwen3_moe")), {}, "3 must divide .* experts, 8"),
        (our_config(hf_config("llama")), {}, "3 must divide .* experts, 0"),
        (t5_config(), {}, "3 must divide .* experts, 0"),
        (our_config(hf_config("qwen2_moe")), {"model.dropout_prob": 0.1}, "dropout_prob 0"),
    ],
)
def test_what_cannot_be_cut_is_refused(config: Any, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config.with_values({"execution.expert_groups": 3, **changed})
