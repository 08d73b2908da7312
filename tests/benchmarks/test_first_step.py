"""The first step of a model whose state is on disk is transformers'; a difference is told."""

from __future__ import annotations

import copy

import pytest

from benchmarks import first_step
from config.bart import BartConfig
from config.errors import UserError
from config.presets import load_config


def test_loss_and_norm_are_those_of_transformers(tmp_path, monkeypatch):
    """With a tiny NLLB in bfloat16 and dropout, as it is trained; both in this process."""
    monkeypatch.setattr("planning.hardware.disk_offload.check_memory_limit", lambda *args: None)
    monkeypatch.setattr("planning.hardware.disk_offload.MIN_ENTRY_BYTES", 1)
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "hidden_size": 64, "dropout_prob": 0.1}
    execution = {"micro_batch_size": 2, "disk": str(tmp_path / "disk"), "host_memory": 0.001}
    config = load_config(BartConfig, "finetuning", "nllb_tiny", {
        "model": {**sizes, "precision": "bfloat16"},
        "training": {"global_batch_size": 4},
        "execution": {**execution, "device": "cpu"},
    })  # fmt: skip
    exact = first_step.exact_config(config)
    metrics = {name: run(exact, tmp_path / "hf") for name, run in first_step.CHILDREN.items()}
    assert metrics["ours"]["disk_bytes"] > 0
    first_step.check_agreement(metrics)
    for name in ("loss", "grad_norm"):
        other = copy.deepcopy(metrics)
        other["ours"][name] *= 1 + 2 * first_step.TOLERANCE
        with pytest.raises(UserError, match=f"our {name} is"):
            first_step.check_agreement(other)
