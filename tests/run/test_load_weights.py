"""A run loads its tokenizer once, and reads each of its files once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import run_finetuning
from data.sources import FileSource, Row
from files.file_location import FileLocation
from huggingface import hub
from tests.huggingface.hub_folders import save
from tests.planning.test_auto_config import write_rows


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the tokenizer was loaded, and each file was read to its end."""
    counts: Counter[str] = Counter()
    load, rows_of = hub.load_tokenizer, FileSource.read_rows

    def loaded(name: str) -> object:
        counts["tokenizer"] += 1
        return load(name)

    def rows(file: FileSource) -> Iterator[tuple[FileLocation, Row]]:
        yield from rows_of(file)
        counts[Path(file.name).name] += 1

    monkeypatch.setattr(hub, "load_tokenizer", loaded)
    monkeypatch.setattr(FileSource, "read_rows", rows)
    return counts


@pytest.mark.usefixtures("cached")
@pytest.mark.parametrize("validation", ["other.jsonl", "0.25"])
def test_a_run_loads_what_it_needs_once(
    validation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counts: Counter[str]
) -> None:
    """One that chooses lengths by the data, evaluates while it trains, and exports."""
    monkeypatch.chdir(tmp_path)
    save("gptj", tmp_path / "gptj")
    write_rows(tmp_path / "train.jsonl", 40, "the lamp")
    write_rows(tmp_path / "other.jsonl", 10, "the lamp")
    command = ["--model", "gptj", "--data.train", "train.jsonl", "--data.validation", validation]
    command += ["--eval.steps", "1", "--eval.metrics", "loss", "--steps", "2"]
    command += ["--save", "run", "--save-hf", "exported"]
    assert run_finetuning.main(command) == 0
    files = {"train.jsonl", validation} & {"train.jsonl", "other.jsonl"}
    assert counts == dict.fromkeys(["tokenizer", *files], 1)
