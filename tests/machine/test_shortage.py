"""What lacks is said in terms of presets and flags."""

from __future__ import annotations

import pytest

from config.errors import UserError
from config.families import config_class_of
from config.presets import load_config, preset_data
from machine.shortage import explain_shortages
from popxl.errors import DeviceMemoryError


def test_a_device_that_is_full_says_what_takes_less() -> None:
    data = preset_data("finetuning", "tiny")
    config = load_config(config_class_of(data, "tiny"), "finetuning", "tiny")
    with pytest.raises(UserError) as caught, explain_shortages("tiny", config):
        raise DeviceMemoryError("the memory of the devices is full: Out of memory")
    assert str(caught.value) == (
        "preset 'tiny': the memory of the devices is full: Out of memory: lower "
        "--micro_batch_size, or leave state in host memory with --execution.placement host"
    )
