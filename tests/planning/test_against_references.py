"""Plans against what others count: PyTorch's operations, XLA's memory."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import popxl
from config.presets import merge_over
from modelling.generation import build_resident_program
from modelling.model_family import get_family
from modelling.phases.training import build_training_program
from planning.requirements import Requirements, finetuning_requirements
from tests.modelling.gptj.hf import hf_model as hf_gptj
from tests.modelling.t5.hf import hf_model as hf_t5
from tests.planning.presets import preset
from tests.slow import slow


@cache
def needs_of(name: str) -> Requirements:
    return needs_with(name)


def needs_with(name: str, **changes: Any) -> Requirements:
    """Of a step that recomputes, with all micro-batches in one pass."""
    config = preset(name, **merge_over({"execution": {"activations": "recompute"}}, changes))
    one_pass = {"execution.micro_batches_per_pass": config.gradient_accumulation}
    return finetuning_requirements(config.with_values(one_pass))


def torch_flops(name: str) -> tuple[int, int]:
    """Operations of a forward and a backward pass of one sample, by Hugging Face's model."""
    config = preset(name)
    input_ids = torch.ones(1, config.model.sequence_length, dtype=torch.long)
    if config.family == "t5":
        model = hf_t5(config)
        labels = torch.ones(1, config.model.decoder_sequence_length, dtype=torch.long)
    else:
        model, labels = hf_gptj(config), input_ids
    with FlopCounterMode(display=False) as forward:
        loss = model(input_ids=input_ids, labels=labels).loss
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("name", ["tiny", "gptj_tiny"])
def test_operations_are_those_that_torch_counts(name: str) -> None:
    forward, backward = torch_flops(name)
    kept = finetuning_requirements(preset(name, execution={"activations": "keep"}))
    assert kept.flops_per_sample == forward + backward
    again = needs_of(name)
    # Layers run forwards twice, but for their last product, whose result nobody needs again.
    assert forward + backward < again.flops_per_sample < 2 * forward + backward


def check_memory(ir: popxl.Ir, bound: float) -> None:
    """The plan of a program that is not compiled, and what it takes when it is.

    Args:
        bound: relative, of the estimate of what XLA takes; all else is exact.
    """
    plan, given = popxl.plan.plan_of(ir), popxl.Session(ir, "cpu").plan()
    assert (plan.variables, plan.streams, plan.remote) == (
        given.variables, given.streams, given.remote
    )  # fmt: skip
    assert plan.flops == given.flops
    assert plan.temporaries == pytest.approx(given.temporaries, rel=bound)


@pytest.mark.parametrize(
    "name",
    [
        "tiny",
        "gptj_tiny",
        slow("base"),  # a minute
    ],
)
def test_memory_of_training_is_what_xla_gives(name: str) -> None:
    config = preset(name, **({} if name == "base" else {"model": {"layers": 1}}))
    check_memory(build_training_program(config, get_family(config).build_phases).ir, 0.25)


@pytest.mark.parametrize(("name", "bound"), [("tiny", 0.15), ("gptj_tiny", 0.1)])
def test_memory_of_generation_is_what_xla_gives(name: str, bound: float) -> None:
    """Temporaries are most of it. XLA packs those of `gptj_tiny` with gaps of 7 %; a plan counts
    the gaps of its own order, 12 % of those of `tiny`."""
    config = preset(name, "inference")
    config = replace(config, model=replace(config.model, eval=True))
    check_memory(build_resident_program(config, get_family(config).generator).ir, bound)


@pytest.mark.slow  # by default all operations of `tiny`, which has such lengths, are counted
def test_encoder_and_decoder_lengths_of_their_own_save_eight_times_the_work() -> None:
    """Against both padded to 512 tokens, as a decoder without a length of its own has them."""
    lengths = {}, {"sequence_length": 512, "decoder_sequence_length": 512}
    own, padded = (
        finetuning_requirements(preset("small", model={"layers": 1, **given})) for given in lengths
    )
    assert padded.flops_per_sample / own.flops_per_sample >= 8


@pytest.mark.parametrize(
    ("name", "bytes_each"), [("tiny", 16), slow("xxl_pod64", 14), ("gptj_6B_1024_pod64", 14)]
)
def test_host_memory_is_the_state_and_the_activations(name: str, bytes_each: int) -> None:
    """Weights, gradients and moments, each once, all but 16-bit weights in float32; rows of
    activations by layer."""
    requirements = needs_of(name)
    config = requirements.config
    assert requirements.state == requirements.parameters * bytes_each
    size = 4 if config.model.precision == "float32" else 2
    width, samples = config.model.hidden_size, config.training.global_batch_size
    encoder = samples * config.model.sequence_length * width * size
    if config.family == "t5":
        decoder = samples * config.model.decoder_sequence_length * width * size
        layers = config.model.layers
        rows = 2 * (layers + 2) * encoder + 2 * (layers + 1) * decoder
    else:
        rows = 2 * (config.model.layers + 1) * encoder
    assert requirements.plan.host_bytes == pytest.approx(requirements.state + rows, rel=1e-3)


@pytest.mark.parametrize(
    ("precision", "activations"),
    [("float32", "keep"), slow("bfloat16", "keep"), ("bfloat16", "recompute")],
)
def test_products_of_linear_layers_are_in_fp8(precision: str, activations: str) -> None:
    """Output, input gradient and weight gradient of GPT-J's 12 hidden² weights a layer. In
    bfloat16 they are written on operands that are scaled back, for XLA to recognise. The products
    of 5 hidden² of them, of which only the layer's output is made, are not computed again. Operands
    in FP8 are not kept: those of a layer are of one input, which its gradient has."""
    kept = {"activations": activations}
    wide, eight = (
        finetuning_requirements(
            preset(
                "gptj_tiny", model={"precision": precision}, execution=kept, fp8={"enabled": on}
            ),
            "gpu",
        ).plan
        for on in (False, True)
    )
    model = preset("gptj_tiny").model
    tokens = preset("gptj_tiny").training.global_batch_size * model.sequence_length
    found = sum(part.float8_flops for part in eight.parts)
    weights = 3 * 12 + (7 if activations == "recompute" else 0)
    assert found == 2 * tokens * model.layers * weights * model.hidden_size**2
    assert eight.flops == wide.flops
    assert sum(part.float8_flops for part in wide.parts) == 0
    scales, matrices = 3 * (1024 + 2), 4  # with history and largest so far; q, k and v are one
    assert eight.host_bytes - wide.host_bytes == 4 * scales * matrices * model.layers


@pytest.mark.parametrize("beta1", [None, 0.9])
def test_state_of_adafactor_is_what_its_buffers_hold(beta1: float | None) -> None:
    own = {"name": "adafactor", "adafactor": {"beta1": beta1}}
    adafactor = needs_with("gptj_tiny", training={"optimizer": own})
    adamw = needs_of("gptj_tiny")
    assert adamw.state - adamw.moments == adafactor.state - adafactor.moments
    saved = adamw.moments - adafactor.moments
    assert saved > adamw.moments * (0.45 if beta1 else 0.95)
    assert adamw.plan.host_bytes - adafactor.plan.host_bytes == saved


def test_resident_layers_take_device_memory_and_no_traffic() -> None:
    phased = needs_of("gptj_tiny").plan
    resident = needs_with("gptj_tiny", execution={"resident_layers": 100}).plan
    moved = [sum(p.host_to_device for p in plan.parts) for plan in (phased, resident)]
    assert moved[1] < moved[0]
    kept = resident.variables - phased.variables
    assert kept == phased.remote - resident.remote > 0
    assert resident.flops == phased.flops
