"""The comparison with torch runs, and compares equal work."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks import beside_huggingface
from benchmarks.huggingface import TorchTraining

ARGUMENTS = ["--layers", "1", "--micro_batch_size", "4", "--rounds", "1"]


@pytest.mark.parametrize("preset", ["tiny", "gptj_tiny"])
def test_it_ends_with_ratios_of_both_kinds_of_work(preset, capsys):
    assert beside_huggingface.main(["--config", preset, *ARGUMENTS]) == 0
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(facts["training"]["seconds"]) == {
        "recompute", "keep", "torch, checkpointing", "torch"
    }  # fmt: skip
    assert set(facts["generation"]["ratios"]) == {"torch / ours"}
    for work in ("training", "generation"):
        found = facts[work]
        for pair, ratio in found["ratios"].items():  # one round: the ratio of the medians
            theirs, ours = (found["seconds"][name] for name in pair.split(" / "))
            np.testing.assert_allclose(ratio, theirs / ours)


def test_it_refuses_to_compare_different_work(monkeypatch, capsys):
    step = TorchTraining.step
    monkeypatch.setattr(TorchTraining, "step", lambda self, *a: 1.001 * step(self, *a))
    code = beside_huggingface.main(["--config", "tiny", *ARGUMENTS, "--work", "training"])
    assert code == 2
    assert "the losses of the first step differ" in capsys.readouterr().err


def test_it_says_that_torch_is_missing(monkeypatch, capsys):
    monkeypatch.setattr("transformers.utils.is_torch_available", lambda: False)
    assert beside_huggingface.main(["--config", "tiny"]) == 2
    assert "pip install -r requirements-dev.txt" in capsys.readouterr().err
