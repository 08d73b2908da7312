"""Rows of tokens that are trained beside a frozen embedding: PEFT's trainable_token_indices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch

import run_export
import run_generation
from tests.modelling.peft_reference import with_peft
from tests.run.test_new_tokens import MODELS, TRAINING, data, tokenizer_in
from tests.run.test_tied_adapters import QUERIES, logits, model_in
from tests.slow import slow
from tests.small_runs import random_model, train


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, tied = tmp_path_factory.mktemp("bases"), ("--model.embedding.tied", "true")
    given = {kind: MODELS[kind] for kind in ("tied", "untied")} | {"t5": (*MODELS["t5"], *tied)}
    return {kind: random_model(folder / kind, *flags) for kind, flags in given.items()}


def cls_of(kind: str) -> str:
    return "t5" if kind == "t5" else "decoder"


CASES: list[tuple[str, Any]] = [
    ("tied", [9, 3, 4]),
    ("tied", {"embed_tokens": [3], "lm_head": [3]}),
    ("untied", [3, 9]),
    ("untied", {"embed_tokens": [9, 3], "lm_head": [9, 3]}),
    ("t5", [3, 9]),
]


@pytest.mark.parametrize(("kind", "tokens"), CASES)
def test_trainable_tokens_of_peft_are_the_same_merged_and_written_again(
    kind: str, tokens: Any, bases: dict[str, Path], tmp_path: Path
) -> None:
    base, of, adapter = bases[kind], cls_of(kind), tmp_path / "adapter"
    settings: dict[str, Any] = {"r": 2, "target_modules": QUERIES[of]}
    model = with_peft(model_in(of, base), **settings, trainable_token_indices=tokens)
    torch.manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "trainable_tokens_delta" in name:
                parameter += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(adapter)
    expected = logits(of, model)
    assert np.abs(expected - logits(of, model_in(of, base))).max() > 0.1
    given = ["--load", str(base), "--adapter.load", str(adapter)]
    assert run_export.main([*given, "--merge", "--save-hf", str(tmp_path / "whole")]) == 0
    merged = logits(of, model_in(of, tmp_path / "whole"))
    np.testing.assert_allclose(merged, expected, rtol=1e-4, atol=1e-5)
    assert run_export.main([*given, "--save-hf", str(tmp_path / "again")]) == 0
    again = peft.PeftModel.from_pretrained(model_in(of, base), tmp_path / "again").eval()
    np.testing.assert_allclose(logits(of, again), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("kind", ["untied", slow("tied"), slow("t5")])
def test_rows_of_new_tokens_are_trained_alone(
    kind: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    """The others stay, bit for bit, and the adapter's file has the new rows and no others."""
    base, run, known = bases[kind], tmp_path / "run", len(tokenizer_in(bases[kind]))
    rows = [{"prompt": f"say <yes> {n}", "completion": f"{n} <yes> <no>"} for n in range(40)]
    given = ("--load", str(base), *TRAINING, *data(tmp_path, rows), "--learning_rate", "0.02")
    given += ("--adapter.rank", "2", "--model.add_tokens", "<yes>", "<no>")
    given += ("--adapter.trainable_tokens", "new")
    for steps in ("2", "4"):
        assert train(run, *given, "--steps", steps) == 0
    assert run_export.main(["--load", str(run), "--save-hf", str(tmp_path / "adapter")]) == 0
    of, whole = cls_of(kind), ("--merge", "--save-hf", str(tmp_path / "whole"))
    assert run_export.main(["--load", str(run), *whole]) == 0
    merged, old = model_in(of, tmp_path / "whole"), model_in(of, base)
    table, before = (m.get_input_embeddings().weight.detach() for m in (merged, old))
    assert torch.equal(table[:known], before[:known])
    assert (table[known] != table[known + 1]).any()
    old.resize_token_embeddings(len(table), mean_resizing=False)
    model = peft.PeftModel.from_pretrained(old, tmp_path / "adapter").eval()
    np.testing.assert_allclose(logits(of, model), logits(of, merged), rtol=1e-4, atol=1e-5)
    assert (tmp_path / "adapter" / "adapter_model.safetensors").stat().st_size < 30_000


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("weights", ["resident", slow("streamed")])
def test_a_model_writes_with_the_rows_of_tokens(
    weights: str, bases: dict[str, Path], tmp_path: Path, capsys: Any
) -> None:
    """As the model does into which they are merged, and not as its base."""
    base, of, adapter = bases["tied"], "decoder", tmp_path / "adapter"
    tokens, answers = list(range(2, 200)), []
    settings: dict[str, Any] = {"r": 2, "target_modules": QUERIES[of]}
    model = with_peft(model_in(of, base), **settings, trainable_token_indices=tokens)
    torch.manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "trainable_tokens_delta" in name:
                parameter += torch.randn_like(parameter)
    model.save_pretrained(adapter)
    given = ("--load", str(base), "--adapter.load", str(adapter))
    whole = ("--load", str(tmp_path / "whole"))
    assert run_export.main([*given, "--merge", "--save-hf", whole[1]]) == 0
    for source in (given, whole, ("--load", str(base))):
        few = ("--generation.weights", weights, "--generation.max_tokens", "8", "--no_template")
        capsys.readouterr()
        assert run_generation.main([*source, *few, "what is 3?"]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] != answers[2]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--adapter.trainable_tokens", "new"), "is new, but no rows are: give --model.add_tokens"),
        (("--adapter.trainable_tokens", "700"), "be rows below model.vocab_size 644"),
        (("--adapter.trainable_tokens", "3,3"), "be rows such as 32000-32003,32010, each once"),
        (
            ("--adapter.trainable_tokens", "3", "--adapter.modules_to_save", "embed_tokens"),
            "some rows of model.embed_tokens.weight, all of which",
        ),
        (("--adapter.trainable_tokens", "3", "--adapter.rank", "0"), "set adapter.rank"),
    ],
)
def test_tokens_that_cannot_be_trained(
    flags: tuple[str, ...], said: str, bases: dict[str, Path], tmp_path: Path, capsys: Any
) -> None:
    given = ["--load", str(bases["tied"]), "--adapter.rank", "2", *flags]
    assert run_export.main([*given, "--save-hf", str(tmp_path / "out")]) == 2
    assert said in capsys.readouterr().err


def test_a_t5_with_a_head_of_its_own_is_refused(tmp_path: Path, capsys: Any) -> None:
    given = [*MODELS["t5"], "--load", "random", "--adapter.rank", "2", "--save-hf", str(tmp_path)]
    assert run_export.main([*given, "--adapter.trainable_tokens", "3"]) == 2
    assert "for a T5 whose head is its embedding" in capsys.readouterr().err


def test_tokens_that_differ_between_modules_are_refused(tmp_path: Path, capsys: Any) -> None:
    tokens = {"embed_tokens": [3], "lm_head": [4]}
    peft.LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=tokens).save_pretrained(
        tmp_path
    )
    given = ["--config", "qwen3_tiny", "--load", "random", "--adapter.load", str(tmp_path)]
    assert run_export.main([*given, "--save-hf", str(tmp_path / "out")]) == 2
    assert "trainable_token_indices is" in capsys.readouterr().err
    assert json.loads((tmp_path / "adapter_config.json").read_text())["r"] == 2
