"""Adapters of experts in PEFT's files, both ways: the same model in both programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers

import run_export
import run_generation
import run_validation
from tests.modelling.llama import hf
from tests.modelling.peft_reference import with_peft
from tests.slow import slow
from tests.small_runs import BATCH, RATE, random_model, train

pytestmark = [
    pytest.mark.usefixtures("few"),
    pytest.mark.filterwarnings("ignore:The following rank_pattern"),  # which PEFT uses all the same
]

QWEN = (
    *("--config", "qwen3_tiny", "--num_hidden_layers", "2", "--hidden_size", "32"),
    *("--model.model_type", "qwen3_moe", "--model.moe_intermediate_size", "16"),
    *("--num_attention_heads", "2", "--model.num_key_value_heads", "2"),
    *("--model.num_experts", "4", "--model.num_experts_per_tok", "2", "--model.vocab_size", "640"),
    *("--model.max_position_embeddings", "256", "--tokenizer", "data/sample/chat_tokenizer"),
)
GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bases")
    qwen = random_model(folder / "qwen3_moe", *QWEN)
    more = {"num_hidden_layers": 1, "vocab_size": 640, "max_position_embeddings": 256}
    hf.hf_model(hf.hf_config("gpt_oss", **more)).save_pretrained(folder / "gpt_oss")
    transformers.AutoTokenizer.from_pretrained(qwen).save_pretrained(folder / "gpt_oss")
    return {kind: folder / kind for kind in ("qwen3_moe", "gpt_oss")}


def model_in(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()


def logits(model: torch.nn.Module) -> np.ndarray:
    with torch.no_grad():
        return model(input_ids=torch.arange(2, 26).reshape(2, 12)).logits.numpy()


CASES: list[Any] = [
    ("qwen3_moe", {"target_modules": [], "target_parameters": [DOWN, GATE_UP]}),
    (
        "qwen3_moe",
        {
            "target_modules": ["q_proj"],
            "target_parameters": [GATE_UP, f"model.layers.1.{DOWN}"],
            "rank_pattern": {"experts.down_proj": 3},
            "alpha_pattern": {"1.mlp.experts.gate_up_proj": 5},
        },
    ),
    ("gpt_oss", {"target_modules": ["v_proj"], "target_parameters": [GATE_UP, DOWN]}),
    slow("gpt_oss", {"target_modules": [], "target_parameters": [DOWN]}),
]


@pytest.mark.filterwarnings("ignore:The following alpha_pattern")
@pytest.mark.parametrize(("kind", "settings"), CASES)
def test_an_adapter_of_peft_is_the_same_merged_and_written_again(
    kind: str, settings: dict[str, Any], bases: dict[str, Path], tmp_path: Path
) -> None:
    base, adapter = bases[kind], tmp_path / "adapter"
    model = with_peft(model_in(base), **{"r": 2, "lora_alpha": 16, **settings})
    model.save_pretrained(adapter)
    expected = logits(model)
    assert np.abs(expected - logits(model_in(base))).max() > 0.03
    given = ["--load", str(base), "--adapter.load", str(adapter), "--save-hf"]
    assert run_export.main([*given, str(tmp_path / "whole"), "--merge"]) == 0
    found = logits(model_in(tmp_path / "whole"))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert run_export.main([*given, str(tmp_path / "again")]) == 0
    model = peft.PeftModel.from_pretrained(model_in(base), tmp_path / "again").eval()
    np.testing.assert_allclose(logits(model), expected, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def run(bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    adapter = ("--adapter.rank", "2", "--adapter.alpha", "32")
    adapter += ("--adapter.target_parameters", GATE_UP, DOWN)
    file = folder.with_name("rows.jsonl")
    rows = [{"prompt": f"what is {n}?", "completion": f"it is {n}"} for n in range(40)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = ("--data.train", str(file), "--data.validation", "0.2", "--sequence_length", "32")
    given = (*adapter, *data, *BATCH, *RATE, "--learning_rate", "0.02")
    for steps in ("2", "4"):
        load = ("--load", str(bases["qwen3_moe"]))
        assert train(folder, *load, *given, "--steps", steps) == 0
    return folder


@pytest.fixture(scope="module")
def whole(run: Path) -> Path:
    """The run's model with its adapters merged."""
    folder = run.with_name("whole")
    assert run_export.main(["--load", str(run), "--merge", "--save-hf", str(folder)]) == 0
    return folder


def test_peft_loads_what_a_run_writes(
    run: Path, whole: Path, bases: dict[str, Path], tmp_path: Path
) -> None:
    """PEFT's model computes the same as the merged model, and not as the base."""
    assert run_export.main(["--load", str(run), "--save-hf", str(tmp_path / "adapter")]) == 0
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert settings["target_modules"] == []
    model = peft.PeftModel.from_pretrained(model_in(bases["qwen3_moe"]), tmp_path / "adapter")
    merged = logits(model_in(whole))
    np.testing.assert_allclose(logits(model.eval()), merged, rtol=1e-4, atol=1e-5)
    assert np.abs(merged - logits(model_in(bases["qwen3_moe"]))).max() > 1e-3


@pytest.mark.parametrize(
    "more",
    [
        slow(("--generation.weights", "resident")),
        ("--generation.weights", "streamed", "--execution.expert_groups", "2"),
    ],
)
def test_a_run_writes_what_its_merged_model_does(
    more: tuple[str, ...], run: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = []
    for source in (run, whole):
        capsys.readouterr()
        few = ("--generation.max_tokens", "8", "--no_template", *more)
        assert run_generation.main(["--load", str(source), *few, "what is 3?"]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]


def test_a_run_is_validated(run: Path, tmp_path: Path) -> None:
    few = ("--eval.metrics", "loss", "--eval.samples", "8")
    losses = []
    for more in ((), ("--execution.expert_groups", "2")):
        assert run_validation.main(["--load", str(run), *few, *more, "--out", str(tmp_path)]) == 0
        losses.append(json.loads((tmp_path / "eval.json").read_text())["loss"])
    np.testing.assert_allclose(*losses, rtol=1e-5)
