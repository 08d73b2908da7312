"""The comparison with torch compares equal work."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks import vs_huggingface
from benchmarks.implementations import (
    JAX,
    generation_implementation,
    training_implementation,
    training_programs,
    trim_padding,
)
from config.errors import UserError
from config.families import config_class_of_preset
from config.llama import LlamaConfig
from config.presets import load_config, load_preset
from config.t5 import T5Config
from tests.slow import slow

ARGUMENTS = ["--layers", "1", "--micro_batch_size", "4", "--rounds", "1"]


@pytest.mark.parametrize(
    ("preset", "more"),
    [
        slow("tiny", ["--generated_tokens", "9", "--examples_per_sample", "3", "--prompts", "10"]),
        slow("gptj_tiny", ["--work", "generation", "--prompts", "5"]),
    ],
)
def test_it_ends_with_ratios(preset, more, capfd):
    assert vs_huggingface.main(["--config", preset, *ARGUMENTS, *more]) == 0
    record = json.loads(capfd.readouterr().out.splitlines()[-1])
    measured = {work: record[work] for work in ("training", "generation") if work in record}
    assert record["generation"]["samples"] == int(more[-1])
    assert set(record["generation"]["ratios"]) == {"torch / ours"}
    if preset == "tiny":
        programs = {"recompute", "keep", "torch, checkpointing", "torch"}
        assert set(record["training"]["seconds"]) == programs
    for comparison in measured.values():
        for pair, ratio in comparison["ratios"].items():  # one round: the ratio of the medians
            theirs, ours = (comparison["seconds"][name] for name in pair.split(" / "))
            np.testing.assert_allclose(ratio, theirs / ours)


@pytest.mark.parametrize(
    "results", [{"keep": 2.0, "torch": 2.001}, {"ours": [[3, 1]], "torch": [[3, 2]]}]
)
def test_it_refuses_to_compare_different_work(results):
    vs_huggingface.check_results(dict.fromkeys(results, next(iter(results.values()))))
    with pytest.raises(UserError, match="differ"):
        vs_huggingface.check_results(results)


@pytest.mark.parametrize(
    ("preset", "expected"),
    [("llama_small", True), ("llama3_2_1B", False), ("llama3_1_8B", False), ("gptj_tiny", False)],
)
def test_jax_trains_what_its_step_is_written_for(preset, expected):
    """Not those with a tied head or scaled rotary frequencies."""
    config = load_config(
        config_class_of_preset(load_preset("finetuning", preset), preset), "finetuning", preset
    )
    assert (JAX in training_programs(config)) == expected


def test_jax_trains_as_torch_does():
    changes = {
        "model": {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48,
                  "sequence_length": 24, "vocab_size": 128, "precision": "float32",
                  "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
        "training": {"global_batch_size": 4},
        "execution": {"micro_batch_size": 4, "device": "cpu"},
        "data": {"examples_per_sample": 1},
    }  # fmt: skip
    config = load_config(LlamaConfig, "finetuning", "llama_small", changes)
    losses = []
    for name in (JAX, "torch"):
        implementation = training_implementation(name, config)
        losses.append([implementation.result, *(implementation.run() for _ in range(3))])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    assert losses[0][-1] < losses[0][0]


def test_a_process_that_fails_is_named(capfd):
    """Its error is printed already."""
    program = ["--config", "tiny", "--work", "training", "--micro_batch_size", "0"]
    assert vs_huggingface.main(program) == 2
    assert "micro_batch_size" in capfd.readouterr().err


def build_config(rows: int) -> T5Config:
    """Returns a configuration of 6 short prompts in long samples."""
    return load_config(
        T5Config,
        "finetuning",
        "tiny",
        {
            "model": {"layers": 1, "sequence_length": 32},
            "training": {"global_batch_size": 6},
            "execution": {"micro_batch_size": 6, "device": "cpu"},
            "data": {"examples_per_sample": rows},
        },
    )


@pytest.mark.slow  # four programs; tests of the models hold that sharing rows changes nothing
def test_sharing_rows_is_the_same_work():
    losses = [training_implementation("keep", build_config(rows), 9.0).result for rows in (1, 3)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-6)
    tokens = [
        generation_implementation("ours", build_config(rows), 6, 9.0).result for rows in (1, 3)
    ]
    assert tokens[0] == tokens[1]


def test_flops_are_those_of_the_examples_without_padding():
    """Encoder and decoder layers are linear in tokens but for attention's scores."""
    short, long = (
        training_implementation(
            "torch", load_config(T5Config, "finetuning", "tiny", {
                "model": {"layers": 1, "sequence_length": length},
                "training": {"global_batch_size": 4},
                "execution": {"micro_batch_size": 4, "device": "cpu"},
            }), 9.0
        ).flops
        for length in (32, 64)
    )  # fmt: skip
    assert short == long


def test_columns_without_anything_are_cut():
    batch = trim_padding(
        {
            "input_ids": np.array([[5, 6, 0, 0], [5, 1, 0, 0]]),
            "segment_ids": np.array([[1, 1, 0, 0], [1, 0, 0, 0]]),
            "decoder_input_ids": np.array([[0, 7, 1], [0, 7, 0]]),
            "labels": np.array([[7, 1, -100], [7, -100, -100]]),
        }
    )
    assert {name: array.shape for name, array in batch.items()} == {
        "input_ids": (2, 2), "segment_ids": (2, 2), "decoder_input_ids": (2, 2), "labels": (2, 2)
    }  # fmt: skip


def test_it_says_that_torch_is_missing(monkeypatch, capsys):
    monkeypatch.setattr("transformers.utils.is_torch_available", lambda: False)
    assert vs_huggingface.main(["--config", "tiny"]) == 2
    assert "pip install -r requirements-dev.txt" in capsys.readouterr().err
