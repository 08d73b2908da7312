"""Plans against what others count: PyTorch's operations, XLA's memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import popxl
from config.families import config_class_of
from config.presets import load_config, preset_data
from config.sections import RunConfig
from modelling.phases.training import build_training
from modelling.spec import family_of
from planning.needs import finetuning_needs
from tests.modelling.gptj.hf import hf_model as hf_gptj
from tests.modelling.t5.hf import hf_model as hf_t5


def preset(name: str, **changes: Any) -> RunConfig:
    config_class = config_class_of(preset_data("finetuning", name), name)
    return load_config(config_class, "finetuning", name, changes)


def torch_flops(name: str) -> tuple[int, int]:
    """Operations of a forward and a backward pass of one sample, by Hugging Face's model."""
    config = preset(name)
    words = torch.ones(1, config.model.sequence_length, dtype=torch.long)
    if config.family == "t5":
        model = hf_t5(config)
        labels = torch.ones(1, config.model.decoder_sequence_length, dtype=torch.long)
    else:
        model, labels = hf_gptj(config), words
    with FlopCounterMode(display=False) as forward:
        loss = model(input_ids=words, labels=labels).loss
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("name", ["tiny", "gptj_tiny"])
def test_operations_are_those_that_torch_counts(name: str) -> None:
    forward, backward = torch_flops(name)
    kept = finetuning_needs(preset(name, execution={"activations": "keep"}))
    assert kept.flops_per_sample == forward + backward
    again = finetuning_needs(preset(name))
    # Layers run forwards twice, but for their last product, whose result nobody needs again.
    assert forward + backward < again.flops_per_sample < 2 * forward + backward


def memory(config: RunConfig) -> tuple[popxl.plan.Plan, Any]:
    """The plan of fine-tuning, and XLA's analysis of the compiled program."""
    session = popxl.Session(build_training(config, family_of(config).layout).ir, "cpu")
    return session.plan(), session._executable.memory_analysis()


@pytest.mark.parametrize(
    "name",
    [
        "tiny",
        pytest.param("base", marks=pytest.mark.slow),  # a minute
    ],
)
def test_memory_is_what_xla_gives(name: str) -> None:
    """Arguments and temporaries; the first are exact, and most of it in real models."""
    plan, xla = memory(preset(name))
    arguments = plan.variables + plan.streams + plan.remote
    # The plan counts output streams, XLA does not; and small constants are part of the code.
    assert arguments == pytest.approx(xla.argument_size_in_bytes, rel=1e-3)
    planned, given = plan.device + plan.remote, xla.temp_size_in_bytes + arguments
    assert planned == pytest.approx(given, rel=0.05)
    assert plan.temporaries == pytest.approx(xla.temp_size_in_bytes, rel=0.15)


def test_encoder_and_decoder_lengths_of_their_own_save_eight_times_the_work() -> None:
    """Against both padded to 512 tokens, as a decoder without a length of its own has them."""
    own = finetuning_needs(preset("small"))
    padded = finetuning_needs(
        preset("small", model={"sequence_length": 512, "decoder_sequence_length": 512})
    )
    assert padded.flops_per_sample / own.flops_per_sample >= 8


@pytest.mark.parametrize(("name", "bytes_each"), [("xxl_pod64", 14), ("gptj_6B_1024_pod64", 14)])
def test_host_memory_is_the_state_and_the_activations(name: str, bytes_each: int) -> None:
    """16-bit weights, float32 gradients and moments, each once; rows of activations by layer."""
    config = preset(name)
    needs = finetuning_needs(config)
    assert needs.state == needs.parameters * bytes_each
    width, size, samples = config.model.hidden_size, 2, config.training.global_batch_size
    encoder = samples * config.model.sequence_length * width * size
    if config.family == "t5":
        decoder = samples * config.model.decoder_sequence_length * width * size
        layers = config.model.layers
        rows = (2 * (layers + 2) + layers) * encoder + 2 * (layers + 1) * decoder
    else:
        rows = 2 * (config.model.layers + 1) * encoder
    assert needs.plan.host == pytest.approx(needs.state + rows, rel=1e-3)
