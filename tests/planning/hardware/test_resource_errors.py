"""What lacks is said in terms of presets and flags."""

from __future__ import annotations

import pytest

from config.errors import UserError
from config.families import config_class_of_preset
from config.presets import load_config, load_preset
from planning.hardware.resource_errors import explain_resource_errors
from popxl.errors import DeviceMemoryError, DiskError, VersionError

FULL = "the memory of the devices is full: Out of memory"
HOST = "leave state in host memory with --execution.placement host"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "lower --micro_batch_size, recompute with --activations recompute, or "),
        (
            {"execution.micro_batch_size": 8},
            "lower --micro_batch_size or --execution.micro_batches_per_pass, recompute with "
            "--activations recompute, or ",
        ),
        (
            {"execution.micro_batch_size": 1, "execution.activations": "recompute"},
            "lower --execution.micro_batches_per_pass, or ",
        ),
        (
            {
                "execution.micro_batch_size": 1,
                "execution.activations": "recompute",
                "execution.micro_batches_per_pass": 1,
            },
            "",
        ),
        ({"model.eval": True}, "lower --micro_batch_size, or "),
    ],
)
def test_a_device_that_is_full_says_what_takes_less(changes, expected) -> None:
    data = load_preset("finetuning", "tiny")
    config = load_config(config_class_of_preset(data, "tiny"), "finetuning", "tiny").with_values(
        changes
    )
    with pytest.raises(UserError) as caught, explain_resource_errors("tiny", config):
        raise DeviceMemoryError(FULL)
    assert str(caught.value) == f"preset 'tiny': {FULL}: {expected}{HOST}"


@pytest.mark.parametrize("error", [DiskError, VersionError])
def test_a_message_of_the_runtime_for_people_is_said_as_it_is(error) -> None:
    data = load_preset("finetuning", "tiny")
    config = load_config(config_class_of_preset(data, "tiny"), "finetuning", "tiny")
    with pytest.raises(UserError, match="^install jax<9$"), explain_resource_errors("tiny", config):
        raise error("install jax<9")
