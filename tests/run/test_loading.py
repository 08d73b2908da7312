"""A run loads its tokenizer once, and reads each of its files once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

import run_finetuning
from data.task import Task
from huggingface import hub
from tests.huggingface.hub_folders import save
from tests.planning.test_choices import write_rows


def test_a_run_loads_what_it_needs_once(
    tmp_path: Path, executables: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that chooses lengths by the data, evaluates while it trains, and exports."""
    monkeypatch.setenv("POPXL_CACHE_DIR", str(executables))
    monkeypatch.chdir(tmp_path)
    save("t5", tmp_path / "t5")
    write_rows(tmp_path / "train.jsonl", 40, "the lamp")
    write_rows(tmp_path / "other.jsonl", 10, "the lamp")
    counts: Counter[str] = Counter()
    load, corpus = hub.load_tokenizer, Task.corpus

    def loaded(name: str) -> object:
        counts["tokenizer"] += 1
        return load(name)

    def read(task: Task, split: str, *chat: object) -> object:
        counts[split] += 1
        return corpus(task, split, *chat)

    monkeypatch.setattr(hub, "load_tokenizer", loaded)
    monkeypatch.setattr(Task, "corpus", read)
    command = ["--model", "t5", "--data.train", "train.jsonl", "--data.validation", "other.jsonl"]
    command += ["--evaluation.steps", "1", "--evaluation.metrics", "loss", "--steps", "2"]
    command += ["--save", "run", "--save-hf", "exported"]
    assert run_finetuning.main(command) == 0
    assert counts == {"tokenizer": 1, "train": 1, "validation": 1}
