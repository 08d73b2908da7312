"""Runs whose experts pass the device in groups: folders do not tell into how many."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import run_export
from checkpoints import CheckpointStore
from tests.small_runs import BATCH, RATE, few_examples, train

RUN = (
    *("--config", "qwen3_tiny", "--num_hidden_layers", "1", "--hidden_size", "32"),
    *("--model.model_type", "qwen3_moe", "--model.moe_intermediate_size", "16"),
    *("--model.num_experts", "4", "--model.num_experts_per_tok", "2"),
    *(*BATCH, *RATE, "--device", "cpu"),
)


def trained(folder: Path, *steps: tuple[str, str]) -> dict[str, np.ndarray]:
    """The state after runs that continue each other.

    Args:
        steps: that a run ends with, and its groups.
    """
    for number, (last, groups) in enumerate(steps):
        load = ("--load", str(folder)) if number else RUN
        flags = ("--training.steps", last, "--execution.expert_groups", groups)
        assert train(folder, *load, *flags) == 0
    return dict(CheckpointStore(folder).load().tensors)


def exported(run: Path, folder: Path) -> dict[str, np.ndarray]:
    assert run_export.main(["--load", str(run), "--save-hf", str(folder)]) == 0
    return load_file(folder / "model.safetensors")


@pytest.mark.slow
@pytest.mark.optimised
def test_a_run_goes_on_with_the_same_and_with_other_groups(tmp_path: Path) -> None:
    with few_examples(tmp_path / "executables"):
        whole = trained(tmp_path / "whole", ("4", "2"))
        cut = trained(tmp_path / "cut", ("2", "2"), ("4", "2"))
        other = trained(tmp_path / "other", ("2", "4"), ("4", "1"))
    assert whole.keys() == cut.keys() == other.keys()
    for name, value in whole.items():
        np.testing.assert_array_equal(cut[name], value, err_msg=name)
        np.testing.assert_allclose(other[name], value, rtol=1e-3, atol=1e-5, err_msg=name)
    ours, theirs = (exported(tmp_path / n, tmp_path / f"{n}_hf") for n in ("whole", "other"))
    assert list(ours) == list(theirs)
    assert ours.keys() <= whole.keys()
    assert all(np.array_equal(ours[n], whole[n]) for n in ours)
