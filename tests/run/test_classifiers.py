"""Classifiers from a language model to transformers and back: what we compute of a folder is what
transformers computes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from sklearn.metrics import f1_score

import run_export
import run_finetuning
import run_generation
import run_validation
from tests.slow import slow

SMALL: dict[str, list[str]] = {
    "tiny": ["--layers", "1"],
    "gptj_tiny": ["--layers", "1", "--model.embedding.vocab_size", "1024"],
    "qwen3_tiny": ["--model.num_hidden_layers", "1"],
}
BATCH = ["--global_batch_size", "8", "--micro_batch_size", "4", "--training.steps", "6"]
RATE = ["--learning_rate", "1e-2", "--model.dropout_prob", "0"]
WORDS = {"good": "fine nice", "bad": "ugly poor", "so-so": "plain grey"}


def write_rows(folder: Path, objective: str, multi: bool = False) -> Path:
    """Rows of texts of several lengths."""
    rng, rows = np.random.default_rng(0), []
    for _ in range(60):
        names = [name for name in WORDS if rng.integers(2)] if multi else [rng.choice([*WORDS])]
        words = rng.permutation(" ".join(["a cat", *(WORDS[name] for name in names)]).split())
        label: Any = names if multi else names[0]
        if objective == "regression":
            label = float(len(words) + rng.standard_normal())
        rows.append({"text": " ".join(words[: rng.integers(2, len(words) + 1)]), "label": label})
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def transformers_scores(folder: Path, rows: list[dict[str, Any]]) -> np.ndarray:
    """Scores of a folder's classifier, in batches of padded texts."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    scores = []
    with torch.no_grad():
        # A T5 takes only texts with equally many end tokens; its padding is none.
        for start in range(0, len(rows), 16):
            texts = [row["text"] for row in rows[start : start + 16]]
            batch = tokenizer(texts, padding=True, return_tensors="pt")
            batch.pop("token_type_ids", None)
            scores.append(model(**batch).logits)
    return torch.cat(scores).numpy()


def read_jsonl(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def evaluated(folder: Path, *flags: str) -> dict[str, float]:
    assert run_validation.main([*flags, "--out", str(folder), "--device", "cpu"]) == 0
    report: dict[str, float] = json.loads((folder / "eval.json").read_text())
    return report


@pytest.mark.parametrize(
    ("preset", "objective", "multi"),
    [
        ("gptj_tiny", "classification", False),
        slow("qwen3_tiny", "classification", False),
        slow("tiny", "classification", False),
        *(slow(p, "regression", False) for p in SMALL),
        *(slow(p, "classification", True) for p in SMALL),
    ],
)
def test_to_transformers_and_back(tmp_path: Path, preset: str, objective: str, multi: bool) -> None:
    file = write_rows(tmp_path, objective, multi)
    rows = read_jsonl(file)
    base, run, out = (tmp_path / name for name in ("base", "run", "out"))
    data = ["--dataset", "sample", "--data.train", str(file), "--data.validation", str(file)]
    small = ["--config", preset, *SMALL[preset], "--device", "cpu"]
    assert run_export.main([*small, "--load", "random", "--save-hf", str(base),
                            "--dataset", "sample"]) == 0  # fmt: skip
    command = [*small, *data, *BATCH, *RATE, "--training.objective", objective]
    command += ["--load", str(base), "--save", str(run), "--save-hf", str(out)]
    command += ["--eval.steps", "3", "--examples_per_sample", "2", "--sequence_length", "64"]
    assert run_finetuning.main(command) == 0
    hf_config = json.loads((out / "config.json").read_text())
    assert hf_config["architectures"][0].endswith("ForSequenceClassification")
    scores = transformers_scores(out, rows)
    ours = evaluated(tmp_path / "report", "--load", str(run))
    of_folder = evaluated(tmp_path / "report2", "--load", str(out), *data)
    names = ("mae", "pearson") if objective == "regression" else ("accuracy", "macro_f1")
    assert {n: ours[n] for n in names} == pytest.approx({n: of_folder[n] for n in names})
    if objective == "regression":
        labels = np.asarray([row["label"] for row in rows])
        assert ours["loss"] == pytest.approx(((scores[:, 0] - labels) ** 2).mean(), rel=1e-4)
        assert ours["mae"] == pytest.approx(np.abs(scores[:, 0] - labels).mean(), rel=1e-4)
        expected = np.corrcoef(scores[:, 0], labels)[0, 1]
        assert ours["pearson"] == pytest.approx(expected, abs=1e-4)
        return
    classes = [hf_config["id2label"][str(i)] for i in range(3)]
    assert classes == sorted(WORDS)
    given = [row["label"] if multi else [row["label"]] for row in rows]
    labels = np.asarray([[name in one for name in classes] for one in given])
    found = scores > 0 if multi else np.eye(3, dtype=bool)[scores.argmax(1)]
    assert ours["accuracy"] == pytest.approx((found == labels).all(1).mean())
    assert ours["macro_f1"] == pytest.approx(f1_score(labels, found, average="macro"), abs=1e-6)
    logits = torch.tensor(scores)
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(labels.argmax(1)))
    if multi:
        loss = torch.nn.functional.binary_cross_entropy_with_logits(
            logits, torch.tensor(labels, dtype=torch.float32)
        )
    assert ours["loss"] == pytest.approx(loss.item(), rel=1e-4)


def test_what_a_classifier_is_not_for_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, small = tmp_path / "classifier", ["--config", "gptj_tiny", *SMALL["gptj_tiny"]]
    made = [*small, "--device", "cpu", "--load", "random", "--dataset", "sample"]
    made += ["--training.objective", "classification"]
    assert run_export.main([*made, "--save-hf", str(folder)]) == 0
    load, text = ["--load", str(folder), "--device", "cpu"], "a cat"
    file = write_rows(tmp_path, "classification")
    as_texts = ["--data.prompt", "{text}", "--data.target", "{label}"]
    as_texts += ["--data.class_labels", ",".join(WORDS), "--save", str(tmp_path / "run")]
    cases: list[tuple[Any, list[str], str]] = [
        (run_generation.main, [*load, text], "writes no text"),
        (run_finetuning.main, [*load, "--data.train", str(file), "--training.objective",
                               "cross_entropy", *as_texts], "is a classifier"),
        (run_finetuning.main, ["--config", "bart_tiny", "--training.objective",
                               "classification", "--data.train", str(file)], "kind bart"),
    ]  # fmt: skip
    for main, arguments, told in cases:
        capsys.readouterr()
        assert main(arguments) != 0
        error = capsys.readouterr().err
        assert told in error
        assert "Traceback" not in error
    assert run_validation.main([*load, "--dataset", "sample", "--plan"]) == 0
    plan = capsys.readouterr().out
    assert plan.startswith("evaluation of ")  # not of generation
    assert "layer by layer" in plan


@pytest.mark.parametrize("preset", ["gptj_tiny", slow("tiny")])
def test_an_adapter_and_its_head_are_peft_s(tmp_path: Path, preset: str) -> None:
    """Of a language model, whose scores the run, PEFT and --adapter.load agree on."""
    file = write_rows(tmp_path, "classification")
    rows = read_jsonl(file)
    base, run, out = (tmp_path / name for name in ("base", "run", "adapter"))
    data = ["--dataset", "sample", "--data.train", str(file), "--data.validation", str(file)]
    small = ["--config", preset, *SMALL[preset], "--device", "cpu", "--sequence_length", "64"]
    assert run_export.main([*small, "--load", "random", "--save-hf", str(base),
                            "--dataset", "sample"]) == 0  # fmt: skip
    command = [*small, *data, *BATCH, *RATE, "--training.objective", "classification"]
    adapter = ["--adapter.rank", "2", "--load", str(base)]
    assert run_finetuning.main([*command, *adapter, "--save", str(run), "--save-hf", str(out)]) == 0
    settings = json.loads((out / "adapter_config.json").read_text())
    assert settings["task_type"] == "SEQ_CLS"
    config = transformers.AutoConfig.from_pretrained(base)
    config.num_labels = 3
    model = transformers.AutoModelForSequenceClassification.from_pretrained(base, config=config)
    model = peft.PeftModel.from_pretrained(model, out).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    with torch.no_grad():
        found = [
            model(tokenizer(row["text"], return_tensors="pt")["input_ids"]).logits for row in rows
        ]
    labels = torch.tensor([sorted(WORDS).index(row["label"]) for row in rows])
    loss = torch.nn.functional.cross_entropy(torch.cat(found), labels).item()
    ours = evaluated(tmp_path / "report", "--load", str(run))
    assert ours["loss"] == pytest.approx(loss, rel=1e-3)
    again = ["--load", str(base), "--adapter.load", str(out), *data, "--training.objective",
             "classification", "--sequence_length", "64"]  # fmt: skip
    assert evaluated(tmp_path / "report2", *again)["loss"] == pytest.approx(loss, rel=1e-3)


@pytest.mark.slow
def test_a_reward_model_begins_with_a_run_and_resumes(tmp_path: Path) -> None:
    """Of a language model's run, which has no head for it; interrupted or not, it is the same."""
    chat, whole, halves = (tmp_path / name for name in ("chat", "whole", "halves"))
    small = ["--config", "qwen3_tiny", *SMALL["qwen3_tiny"], "--device", "cpu", *BATCH, *RATE]
    small += ["--training.optimizer.learning_rate.function", "constant"]
    small += ["--training.optimizer.learning_rate.warmup_proportion", "0"]
    assert run_finetuning.main([*small, "--dataset", "sample", "--save", str(chat)]) == 0
    rows = [{"chosen": "a good cat " * (i % 3 + 1), "rejected": "bad", "margin": i % 2}
            for i in range(40)]  # fmt: skip
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reward = [*small, "--load", str(chat), "--checkpoint.load_optimizer", "false",
              "--training.objective", "reward", "--data.train", str(file),
              "--data.validation", str(file)]  # fmt: skip
    assert run_finetuning.main([*reward, "--save", str(whole)]) == 0
    assert run_finetuning.main([*reward, "--save", str(halves), "--training.steps", "3"]) == 0
    assert run_finetuning.main(["--save", str(halves), "--training.steps", "6"]) == 0
    losses = [
        [row["loss"] for row in read_jsonl(run / "metrics.jsonl") if "loss" in row]
        for run in (whole, halves)
    ]
    assert losses[0] == losses[1]
    assert evaluated(tmp_path / "report", "--load", str(halves))["accuracy"] > 0.9
