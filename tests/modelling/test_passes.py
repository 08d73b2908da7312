"""Micro-batches that pass the layers in groups give the same bits as all of them together."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import popxl
from config.errors import ConfigError
from modelling.phases.training import build_training_program
from planning.hardware import disk_offload
from planning.program_variants import ProgramVariant, default_variant
from tests.modelling.gptj.hf import small_config
from tests.modelling.llama.hf import hf_config
from tests.modelling.llama.hf import our_config as llama_config
from tests.modelling.sessions import fine_tuning
from tests.modelling.test_activations import GPTJ, LLAMA, T5, _config, _train
from tests.slow import slow

MODELS = {
    "t5": lambda **split: _config(T5, {}, "float32", 0.2, layers=2, **split),
    "gptj": lambda **split: _config(GPTJ, {}, "float32", 0.2, layers=2, **split),
    **{
        kind: lambda kind=kind, **split: llama_config(hf_config(kind), dropout_prob=0.2, **split)
        for kind in ("llama", "gemma2", "mistral", "mixtral", "qwen3_moe")
    },
}
"""Small models with dropout: with untied and tied heads, shared relative positions, experts."""


@contextmanager
def all_on_disk() -> Iterator[str]:
    """A folder that takes all entries of a program, the smallest too."""
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk_offload, "MIN_ENTRY_BYTES", 1)
        patch.setattr(disk_offload, "usable_host_bytes", lambda config: 0)
        yield folder


def check(name: str, fields: dict[str, Any], split: dict[str, int], numbers: list[int]) -> None:
    """Assert that losses, norms, weights and optimizer state have the same bits after a few steps.

    Args:
        fields: of the configuration, by dotted name.
        split: dp, tp and micro_batch.
        numbers: micro-batches per pass, compared with all of them.
    """
    config = MODELS[name](**split).with_values(fields)
    family = {"t5": T5, "gptj": GPTJ}.get(name, LLAMA)

    def run(per_pass: int) -> Any:
        at_once = config.with_values({"execution.micro_batches_per_pass": per_pass})
        if config.execution.disk is None:
            return _train(family, at_once)
        with all_on_disk() as folder:
            return _train(family, at_once.with_values({"execution.disk": folder}))

    every = config.gradient_accumulation
    losses, norms, state = run(every)
    for number in numbers:
        assert every % number == 0
        assert number < every
        found = run(number)
        assert found[:2] == (losses, norms)
        assert [n for n in state if found[2][n] != state[n]] == []


@pytest.mark.usefixtures("cached")
@pytest.mark.parametrize(
    ("name", "fields", "split", "numbers"),
    [
        ("gptj", {"execution.activations": "recompute"}, {}, [1]),  # with a loop of passes
        ("t5", {"execution.activations": "keep"}, {"micro_batch": 2}, [2]),  # first and last pass
        slow(
            "qwen3_moe",
            {"execution.expert_groups": 2, "model.dropout_prob": 0.0},
            {"micro_batch": 2},
            [1],
        ),
    ],
)
def test_bits_of_a_family(
    name: str, fields: dict[str, Any], split: dict[str, int], numbers: list[int]
) -> None:
    check(name, fields, split, numbers)


LAYOUTS = [{}, {"tp": 2}, {"dp": 2, "micro_batch": 1}, {"dp": 2, "tp": 2, "micro_batch": 1}]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"model.precision": "bfloat16"},
    {"model.precision": "float16", "execution.loss_scaling": 128.0},
    {"execution.update": "deferred"},
    {"training.optimizer.state": "8bit_residual8", "model.precision": "bfloat16"},
    {"adapter.rank": 4, "adapter.dropout": 0.3},
    {"training.trainable": "*norm*"},
    {"fp8.enabled": True, "model.precision": "bfloat16"},
    {"execution.rts_activations": False, "execution.transpose_batch_sequence": True},
    {"execution.device_iterations": 2},
    {"execution.device_iterations": 2, "fp8.enabled": True, "model.precision": "bfloat16"},
    {"execution.disk": "a folder"},
    {"execution.disk": "a folder", "adapter.rank": 4},
]


@pytest.mark.slow
@hypothesis.settings(max_examples=12, deadline=None, print_blob=True)
@hypothesis.given(
    name=st.sampled_from(sorted(MODELS)),
    options=st.sampled_from(OPTIONS),
    split=st.sampled_from(LAYOUTS),
    activations=st.sampled_from(["recompute", "keep"]),
    number=st.sampled_from([1, 2]),
)
def test_bits_of_any_program(
    name: str, options: dict[str, Any], split: dict[str, int], activations: str, number: int
) -> None:
    split = {"micro_batch": 2, **split}
    if options.get("fp8.enabled") and name not in ("t5", "gptj"):
        options = {**options, "fp8.recipe": "current"}
    check(name, {**options, "execution.activations": activations}, split, [number])


@pytest.mark.slow
@pytest.mark.parametrize("fields", OPTIONS[-4:])
def test_bits_of_several_steps_and_of_state_on_disk(fields: dict[str, Any]) -> None:
    check("gptj", fields, {}, [1])


@pytest.mark.usefixtures("cached")
@pytest.mark.parametrize(
    ("name", "precision", "split"),
    [
        ("llama", "bfloat16", {"micro_batch": 2, "dp": 2}),  # a borrowed table, parts of weights
        slow("gptj", "float32", {}),
        slow("t5", "bfloat16", {"micro_batch": 2, "dp": 2}),
        slow("mistral", "bfloat16", {"tp": 2}),
    ],
)
def test_gradients_in_bfloat16_are_rounded_once_a_pass(
    name: str, precision: str, split: dict[str, int]
) -> None:
    config = MODELS[name](**split)
    fields = {
        "training.gradient_dtype": "bfloat16",
        "training.optimizer.state": "bfloat16",
        config.model.field_path("num_hidden_layers"): 1,
        "model.precision": precision,
    }
    config = config.with_values(fields)
    family, module = {"t5": T5, "gptj": GPTJ}.get(name, LLAMA)
    weights, batch = family.weight_map(config).init_weights(seed=0), module.batches(1)[0]
    passes = config.gradient_accumulation

    def gradients(per_pass: int, dtype: str) -> dict[str, np.ndarray]:
        fields = {"execution.micro_batches_per_pass": per_pass, "training.gradient_dtype": dtype}
        model = fine_tuning(config.with_values(fields), gradients=True)
        model.write(weights)
        with model:
            model.run([batch], [0.0])
            return model.gradients()

    exact = gradients(1, "float32")
    for per_pass, roundings in ((passes, 1), (1, passes)):
        for name, found in gradients(per_pass, "bfloat16").items():
            scale = np.abs(exact[name]).max()
            error = np.abs(found - exact[name]).max() / scale
            assert 0 < error < roundings * 2**-7, name


def test_gradients_of_one_replica_are_their_own_accumulators() -> None:
    """So passes take no memory but for the sum of losses."""

    def gradient_bytes(per_pass: int) -> int:
        config = small_config(layers=1).with_values({"execution.micro_batches_per_pass": per_pass})
        buffers = build_training_program(config, GPTJ[0].build_phases).ir.remote_buffers
        return sum(_nbytes(buffer) for buffer in buffers if buffer.kind == "gradients")

    assert gradient_bytes(1) - gradient_bytes(4) == popxl.float32.itemsize


def _nbytes(buffer: popxl.RemoteBuffer) -> int:
    return math.prod(buffer.tensor_shape) * buffer.tensor_dtype.itemsize * buffer.entries


@pytest.mark.parametrize("per_pass", [1, 2, 4])
def test_buffers_hold_the_micro_batches_of_a_pass(per_pass: int) -> None:
    config = small_config(layers=1).with_values({"execution.micro_batches_per_pass": per_pass})
    ir = build_training_program(config, GPTJ[0].build_phases).ir
    between = [b for b in ir.remote_buffers if b.kind == "activations between layers"]
    assert {buffer.entries for buffer in between} == {2 * per_pass}
    inputs = [b for b in ir.remote_buffers if b.kind == "inputs"]
    assert {buffer.entries for buffer in inputs} == {per_pass}


def test_what_divides_no_step_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"accumulation 4 .*execution\.micro_batches_per_pass 3"):
        small_config().with_values({"execution.micro_batches_per_pass": 3})


@pytest.mark.parametrize(
    ("fields", "per_pass"),
    [
        ({}, 1),
        ({"execution.disk": "scratch"}, 4),  # each pass would read all weights
        ({"execution.tensor_parallel": 2}, 4),
        ({"execution.micro_batches_per_pass": 2}, 2),
    ],
)
def test_one_cpu_device_takes_one_micro_batch_at_a_time(
    fields: dict[str, Any], per_pass: int
) -> None:
    config = small_config().with_values({"execution.device": "cpu", **fields})
    variant = default_variant(config)
    assert variant == ProgramVariant(per_pass, variant.saved_layers)
    assert bool(variant.saved_layers) == (per_pass == 1), "else memory would grow"


def test_frozen_layers_have_a_seed_for_each_micro_batch() -> None:
    """Frozen layers without a backward pass have a seed per micro-batch, too."""
    fields = {"training.trainable": "lm_head", "model.dropout_prob": 0.2}
    config, family = small_config(layers=1).with_values(fields), GPTJ[0]
    ir = build_training_program(
        config, family.build_phases, weight_map=family.weight_map(config)
    ).ir
    graphs = str(ir).split("\ngraph ")
    loops = [text for text in graphs if "_batch_serial_step" in text.partition("(")[0]]
    assert len(loops) == 3, "embeddings, the layer, the loss"
    assert all("create_random_seed" in text for text in loops)
