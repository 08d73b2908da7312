"""The loop of the documentation, with a stand-in for vLLM: sample, score, train, sample again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import run_export
from run.records.metrics_jsonl import read_metrics
from tests.pages import ROOT

STAND_IN = Path(__file__).parent / "vllm_stand_in"
NARROW = (
    *("--config", "qwen3_tiny", "--load", "random", "--model.vocab_size", "640"),
    *("--model.max_position_embeddings", "256", "--num_hidden_layers", "1", "--hidden_size", "32"),
    *("--model.intermediate_size", "32", "--tokenizer", "data/sample/chat_tokenizer"),
)


@pytest.mark.slow
def test_two_rounds_of_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round's adapter, which PEFT loads, is the policy of the next."""
    monkeypatch.chdir(ROOT)
    model, prompts, folder = tmp_path / "model", tmp_path / "prompts.jsonl", tmp_path / "loop"
    assert run_export.main([*NARROW, "--save-hf", str(model)]) == 0
    asked = [{"role": "user", "content": "Anna took the lamp. Who took it?"}]
    prompts.write_text((json.dumps({"prompt": asked, "answer": "Anna"}) + "\n") * 2)
    path = os.pathsep.join([str(STAND_IN), str(ROOT / "runtime/src"), str(ROOT)])
    bin_path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PYTHONPATH": path, "PATH": bin_path}
    flags = ("--training.beta", "0.1", "--global_batch_size", "4", "--micro_batch_size", "4",
             "--sequence_length", "64", "--device", "cpu")  # fmt: skip
    command = ["bash", "docs/rollouts/loop.sh", model, prompts, folder, "2", *flags]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for round_ in (1, 2):
        first, *_ = read_metrics(folder / f"run-{round_}" / "metrics.jsonl")
        assert first["clip_ratio/region_mean"] == pytest.approx(0, abs=1e-3)
        assert first["kl"] == pytest.approx(0, abs=1e-2)
        assert (folder / f"adapter-{round_}" / "adapter_model.safetensors").exists()
