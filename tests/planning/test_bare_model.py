"""A model's config.json alone, without weights, is enough to plan it on any machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import run_finetuning
from tests.slow import slow

LLAMA_3_1_8B = {
    # as meta-llama/Llama-3.1-8B has it, in the way of writing before transformers 5
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 128000, "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 4096,
    "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 131072,
    "mlp_bias": False, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3",
    },
    "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0", "use_cache": True, "vocab_size": 128256,
}  # fmt: skip
LAYER, REST = 218_112_000, 1_050_677_248
"""Parameters; in all 8,030,261,248 in 32 layers."""


@pytest.mark.parametrize(
    ("layers", "machine", "fits", "precision"),
    [
        slow(1, "rtx4090", True, "bfloat16"),
        slow(32, "h200", True, "bfloat16"),
        # a host of 128 GB is too small for state and activations
        slow(32, "rtx4090", False, "bfloat16"),
        (1, "laptop", False, "float32"),
        slow(32, "laptop_64", False, "float32"),
    ],
)
def test_llama_3_1_8b(
    layers: int,
    machine: str,
    fits: bool,
    precision: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes, parameters = LLAMA_3_1_8B | {"num_hidden_layers": layers}, layers * LAYER + REST
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    plan = tmp_path / "plan.json"
    command = ["--model", str(tmp_path), "--plan", "--plan-json", str(plan), "--machine", machine]
    if layers == 1:  # one program to simulate for each micro-batch
        command += ["--activations", "recompute"]
    assert run_finetuning.main(command) == 0
    out = capsys.readouterr().out
    size = {"bfloat16": 14, "float32": 16}[precision]
    assert f"{parameters / 1e6:,.1f} M parameters in {precision}" in out
    assert f"state        {parameters * size / 1e9:.2f} GB = parameters × {size} bytes" in out
    assert f"fits         {'yes' if fits else 'NO'}: " in out
    assert json.loads(plan.read_text())["parameters"] == parameters
