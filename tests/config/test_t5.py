"""The rules between fields of a FLAN-T5 configuration."""

from __future__ import annotations

import pytest

from config.errors import ConfigError
from config.t5 import T5Config


def test_gradient_accumulation_is_derived():
    config = T5Config.from_dict(
        {
            "training": {"global_batch_size": 96},
            "execution": {"micro_batch_size": 4, "data_parallel": 3},
        }
    )
    assert config.gradient_accumulation == 8


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {
                "training": {"global_batch_size": 64},
                "execution": {"micro_batch_size": 3, "data_parallel": 5},
            },
            "training.global_batch_size 64 must be divisible by execution.micro_batch_size 3 × "
            "execution.data_parallel 5 = 15",
        ),
        (
            {"execution": {"tensor_parallel": 4}},
            "model.attention.heads 6 must be divisible by execution.tensor_parallel 4",
        ),
        (
            {"model": {"d_ff": 1023}, "execution": {"tensor_parallel": 2}},
            "model.d_ff 1023 must be divisible by execution.tensor_parallel 2",
        ),
        (
            {"execution": {"attention_serialisation": 3}},
            "model.sequence_length 512 must be divisible by execution.attention_serialisation 3",
        ),
        (
            {"model": {"attention": {"relative_attention_num_buckets": 30}}},
            "relative_attention_num_buckets 30 must be divisible by 4, and "
            "relative_attention_max_distance 128 more than half of it",
        ),
        (
            {
                "training": {
                    "optimizer": {"learning_rate": {"warmup_steps": 1, "warmup_proportion": 0.1}}
                }
            },
            "learning_rate has warmup_steps 1 and warmup_proportion 0.1, but one of them must be "
            "null",
        ),
    ],
)
def test_numbers_that_do_not_fit(data, message):
    with pytest.raises(ConfigError) as info:
        T5Config.from_dict(data)
    assert str(info.value) == message


def test_generation_takes_any_micro_batch():
    T5Config.from_dict({"model": {"eval": True}, "execution": {"micro_batch_size": 7}})
