"""Large data: made by other processes as by this one, and kept beside the run."""

from __future__ import annotations

import json
import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from config.errors import UserError
from config.llama import LlamaConfig
from config.presets import load_config
from config.t5 import T5Config
from data import sources, token_cache
from data.causal_lm import CAUSAL_LM
from data.length_stats import measure_lengths
from data.pipeline import Pipeline
from data.seq2seq import SEQ2SEQ
from data.task import SAMPLE_FOLDER
from data.tokenize_worker import tokenize_split
from files.errors import WriteError
from files.run_folder import RunFolder
from huggingface.hub import load_tokenizer
from tests.children import WITHOUT_TORCH
from tests.full_disk import full_disk
from tests.slow import slow
from tests.small_runs import vocabulary

TALK = [{"role": "user", "content": "Who, ☃?"}, {"role": "assistant", "content": "Paul"}]
ROWS: dict[str, list[dict[str, Any]]] = {
    "chat": [*({"messages": [*TALK, {**TALK[0], "content": f"{n}"}, TALK[1]]} for n in range(40)),
             {"messages": TALK[:1]}],
    "text": [{"prompt": f"Anna {n}", "completion": f" took ☃ {n}"} for n in range(40)],
    "plain": [{"text": f"Sara left house {n}. " * (1 + 900 * (n == 3))} for n in range(40)],
}  # fmt: skip


def run_of(
    folder: Path, rows: list[dict[str, Any]], shape: Any = CAUSAL_LM, **data: Any
) -> Pipeline:
    file = folder / "rows.jsonl"
    if not file.exists():
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    t5 = shape is SEQ2SEQ
    tokenizer = str(SAMPLE_FOLDER / ("t5_tokenizer" if t5 else "chat_tokenizer"))
    config_class, preset = (T5Config, "tiny") if t5 else (LlamaConfig, "qwen3_tiny")
    given = {
        "data": {"dataset": "mnli", "train": str(file), "tokenizer": tokenizer, **data},
        "model": vocabulary(config_class, 640) | {"sequence_length": 128},
        "checkpoint": {"save": str(folder / "run")},
    }
    return Pipeline(load_config(config_class, "finetuning", preset, given), shape)


@pytest.fixture
def large(monkeypatch):
    """Whatever is read counts as large, and is prepared here: other processes take seconds."""
    monkeypatch.setattr(sources, "MIN_BYTES", 1)
    monkeypatch.setattr(
        token_cache,
        "_run_tokenize_worker",
        lambda data, split, to: tokenize_split(data, split, 1, to),
    )


def read(data: Pipeline) -> tuple[Any, ...]:
    """All that a pipeline makes of its data."""
    splits = ("train", "validation") if data.user_config.data.validation else ("train",)
    corpora = [data.read_tokenized_corpus(split) for split in splits]
    plain = data.task.row_format == "language_modeling"
    return (
        [[e.prompt if plain else e[:2] for e in corpus.examples] for corpus in corpora],
        [[str(place) for place in corpus.locations] for corpus in corpora],
        [(t.ids.tolist(), t.loss_mask.tolist()) for c in corpora for t in c.tokens or ()],
        [corpus.dropped_row_messages for corpus in corpora],
        measure_lengths(data, splits),
        data.make_training_samples().digest,
    )


@pytest.mark.parametrize(
    ("kind", "shape", "more"),
    [
        ("chat", CAUSAL_LM, {"validation": "0.3"}),
        ("text", CAUSAL_LM, {"validation": "0.3"}),
        ("plain", CAUSAL_LM, {}),
        ("text", SEQ2SEQ, {"on_long_target": "truncate"}),
    ],
)
@pytest.mark.parametrize("processes", [1, slow(2)], ids=["here", "processes"])
def test_what_is_prepared_is_the_same_and_a_second_run_prepares_nothing(
    tmp_path, kind, shape, more, processes, monkeypatch, capsys
):
    expected = read(run_of(tmp_path, ROWS[kind], shape, **more))
    said = capsys.readouterr().err
    monkeypatch.setattr(sources, "MIN_BYTES", 1)
    if processes == 1:
        monkeypatch.setattr(
            token_cache,
            "_run_tokenize_worker",
            lambda data, split, to: tokenize_split(data, split, 1, to),
        )
    monkeypatch.setattr(token_cache, "_num_usable_cpus", lambda: processes)
    assert read(run_of(tmp_path, ROWS[kind], shape, **more)) == expected
    assert capsys.readouterr().err == said
    monkeypatch.setattr(token_cache, "_run_tokenize_worker", None)
    assert read(run_of(tmp_path, ROWS[kind], shape, **more)) == expected
    assert "the data are ready in " in capsys.readouterr().err


def test_other_data_and_settings_are_read_anew(tmp_path, large, capsys):
    rows = ROWS["text"]
    first = run_of(tmp_path, rows).make_training_samples().digest
    assert run_of(tmp_path, rows, separator=" so:").make_training_samples().digest != first
    (tmp_path / "rows.jsonl").write_text(json.dumps(rows[0]) + "\n")
    assert len(run_of(tmp_path, rows).make_training_samples()) == 1
    assert "are ready" not in capsys.readouterr().err


CHATTER = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}"


def texts_of(folder: Path, tokenizer: Path, **data: Any) -> str:
    """What the first conversation's tokens say."""
    run = run_of(folder, ROWS["chat"], tokenizer=str(tokenizer), **data)
    return str(
        run.tokenizer.hf_tokenizer.decode((run.read_tokenized_corpus("train").tokens or ())[0].ids)
    )


def changed(tokenizer: Path, **values: Any) -> None:
    """Other values in tokenizer_config.json."""
    file = tokenizer / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_another_chat_template_is_read_anew(tmp_path, large):
    """The tokenizer's own, one in a file, and the special tokens that they write."""
    tokenizer, file = tmp_path / "tokenizer", tmp_path / "chat.jinja"
    load_tokenizer(str(SAMPLE_FOLDER / "chat_tokenizer")).save_pretrained(tokenizer)
    (tokenizer / "chat_template.jinja").write_text(CHATTER)
    first = texts_of(tmp_path, tokenizer)
    (tokenizer / "chat_template.jinja").write_text(CHATTER.replace(": ", " says: "))
    assert "says: " not in first
    assert "user says: " in texts_of(tmp_path, tokenizer)
    file.write_text(CHATTER.replace(": ", " wrote: "))
    assert "user wrote: " in texts_of(tmp_path, tokenizer, chat_template=str(file))
    file.write_text(CHATTER.replace(": ", " asked: ").replace("{{ eos_token }}", "{{ bos_token }}"))
    assert "user asked: " in texts_of(tmp_path, tokenizer, chat_template=str(file))
    changed(tokenizer, bos_token="<|im_start|>")
    assert "<|im_start|>" in texts_of(tmp_path, tokenizer, chat_template=str(file))
    changed(tokenizer, bos_token="<|im_end|>")
    assert "<|im_start|>" not in texts_of(tmp_path, tokenizer, chat_template=str(file))


def test_another_version_of_a_library_is_read_anew(tmp_path, large, monkeypatch, capsys):
    run_of(tmp_path, ROWS["text"]).make_training_samples()
    monkeypatch.setattr(token_cache, "version", lambda name: "0")
    run_of(tmp_path, ROWS["text"]).make_training_samples()
    assert "are ready" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-1] + bytes([b[-1] ^ 1]), lambda b: b[:9], lambda b: b""]
)
def test_damaged_files_are_made_again(tmp_path, large, damage, capsys):
    first = run_of(tmp_path, ROWS["text"]).make_training_samples().digest
    (kept,) = RunFolder(tmp_path / "run").tokenized_data_folder.rglob("*.safetensors")
    kept.write_bytes(damage(kept.read_bytes()))
    assert run_of(tmp_path, ROWS["text"]).make_training_samples().digest == first
    assert "the data are read anew" in capsys.readouterr().err
    again = run_of(tmp_path, ROWS["text"]).make_training_samples()
    assert again.digest == first
    assert "are ready in" in capsys.readouterr().err


@pytest.mark.parametrize("large_enough", [True, False], ids=["same_size", "longer"])
def test_data_that_are_rewritten_while_they_are_read_are_not_kept(
    tmp_path, large, large_enough, monkeypatch
):
    """Nor under the digest of what they were before; also if they look as old as they were."""
    make, data = token_cache._run_tokenize_worker, run_of(tmp_path, ROWS["text"])
    file = tmp_path / "rows.jsonl"

    def rewritten(*given: Any) -> None:
        time.sleep(0.02)  # longer than a tick of the clock that stamps files
        times = file.stat().st_atime_ns, file.stat().st_mtime_ns
        other = file.read_text().replace("Anna", "Sara" if large_enough else "Sarah")
        file.write_text(other)
        os.utime(file, ns=times)
        make(*given)

    monkeypatch.setattr(token_cache, "_run_tokenize_worker", rewritten)
    with pytest.raises(UserError, match=r"rows.jsonl has changed while it was read: start again"):
        data.make_training_samples()
    assert not list(RunFolder(tmp_path / "run").tokenized_data_folder.iterdir())


def test_mistakes_that_processes_find_are_the_same_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(WITHOUT_TORCH))
    monkeypatch.setattr(sources, "MIN_BYTES", 1)
    rows = [*ROWS["text"], {"prompt": "a", "completion": None}]
    with pytest.raises(UserError, match="rows.jsonl, line 41: column 'completion' holds null"):
        run_of(tmp_path, rows).make_training_samples()
    assert not list(RunFolder(tmp_path / "run").tokenized_data_folder.iterdir())


def test_processes_that_die_are_said(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "MIN_BYTES", 1)
    monkeypatch.setattr(token_cache.sys, "executable", "/bin/false")
    with pytest.raises(UserError, match="the processes that read the data broke off"):
        run_of(tmp_path, ROWS["text"]).make_training_samples()


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_cannot_be_written_does_not_matter(tmp_path, large):
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o500)
    assert len(run_of(tmp_path, ROWS["text"]).make_training_samples()) > 0


@pytest.mark.parametrize("everywhere", [False, True])
def test_a_full_disk_ends_nothing(tmp_path, everywhere, monkeypatch, capsys):
    """The files go elsewhere, or the data are read without files."""
    expected = read(run_of(tmp_path, ROWS["text"]))
    monkeypatch.setattr(sources, "MIN_BYTES", 1)

    def make(data: Pipeline, split: Any, to: Path) -> None:
        with full_disk(100) if everywhere or tmp_path in to.parents else nullcontext():
            tokenize_split(data, split, 1, to)

    monkeypatch.setattr(token_cache, "_run_tokenize_worker", make)
    monkeypatch.setattr(token_cache.tempfile, "tempdir", str(tmp_path.parent))
    capsys.readouterr()
    assert read(run_of(tmp_path, ROWS["text"])) == expected
    said = capsys.readouterr().err.splitlines()
    warned = [line for line in said if line.endswith("File too large")]
    assert len(warned) == (2 if everywhere else 1)
    assert all(line.startswith("warning: cannot write prepared data ") for line in warned)
    assert not list(RunFolder(tmp_path / "run").tokenized_data_folder.iterdir())


@pytest.mark.slow  # other processes take seconds
def test_a_full_disk_of_the_processes_is_one_too(tmp_path):
    folder = tmp_path / "full"
    folder.mkdir()
    data = run_of(tmp_path, ROWS["text"])
    with full_disk(100), pytest.raises(WriteError, match=r"train.safetensors: File too large"):
        token_cache._run_tokenize_worker(data, "train", folder)


def test_what_is_read_lazily_is_a_sequence(tmp_path, large):
    corpus = run_of(tmp_path, ROWS["text"]).read_tokenized_corpus("train")
    first = corpus.first_examples(3)
    assert [e.prompt for e in first.examples] == ["Anna 0", "Anna 1", "Anna 2"]
    assert corpus.examples[-1] == corpus.examples[39]
    np.testing.assert_array_equal((first.tokens or ())[2].ids, (corpus.tokens or ())[2].ids)
    with pytest.raises(IndexError):
        corpus.examples[40]
