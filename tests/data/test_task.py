"""Tasks in files: reading, templates, labels, lengths, and a sentence for what does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from config.errors import UserError
from config.sections import Data
from data.causal_lm import PackedSequences
from data.examples import Example
from data.prompt_template import Template
from data.sample.__main__ import WRITERS
from data.sources import HubDataset, source_from_name
from data.task import SAMPLE_FOLDER, task_from_config
from tests.data.corpora import encode, run_tokenizer, token_stream

ROWS = [{"text": 'a "quoted", text', "summary": "a"}, {"text": "naïve ☃\nline", "summary": "b 2"}]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    """A file of rows, in the form that its suffix says."""
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    else:
        table = pyarrow.Table.from_pylist(rows).to_pandas()
        table.to_csv(path, index=False, sep={".csv": ",", ".tsv": "\t"}[path.suffix])
    return str(path)


def examples_of(file: str, **fields: str) -> list[Example]:
    return task_from_config(Data(train=file, **fields)).read_corpus("train").examples


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".tsv", ".parquet"])
def test_every_kind_of_file_has_the_same_rows(tmp_path, suffix):
    file = write(tmp_path / f"rows{suffix}", ROWS)
    found = examples_of(file, prompt="summarize: {text} {{ok}}", target="{summary}")
    assert found == [
        Example('summarize: a "quoted", text {ok}', "a"),
        Example("summarize: naïve ☃\nline {ok}", "b 2"),
    ]


@pytest.mark.parametrize(
    ("row", "example"),
    [
        ({"prompt": "p", "completion": "c"}, Example("p", "c")),
        ({"instruction": "do", "input": "this", "output": "done"}, Example("do\nthis", "done")),
        ({"instruction": "do", "input": "", "output": "done"}, Example("do", "done")),
        ({"instruction": "do", "output": 3}, Example("do", "3")),
    ],
)
def test_usual_columns_need_no_template(tmp_path, row, example):
    assert examples_of(write(tmp_path / "rows.jsonl", [row])) == [example]


def test_labels_are_words_or_their_numbers(tmp_path):
    rows = [{"t": "x", "l": "no"}, {"t": "y", "l": 0}, {"t": "z", "l": -1}]
    data = Data(
        train=write(tmp_path / "r.jsonl", rows), prompt="{t}", target="{l}", class_labels="yes, no"
    )
    task = task_from_config(data)
    corpus = task.read_corpus("train")
    assert corpus.examples == [Example("x", "no"), Example("y", "yes")]
    assert corpus.unlabeled == 1
    assert task.metric_names == ("accuracy", "macro_f1")


def test_a_template_reaches_columns_only():
    row = {"a": "x", "a.__class__": "y", "b[0]": "z"}
    assert Template("{a.__class__}{b[0]}{{a}}{a}").render(row) == "yz{a}x"


@pytest.mark.parametrize("text", ["{", "}", "{}", "a {b", "{a{b}}"])
def test_a_lone_brace_is_said(text):
    with pytest.raises(ValueError, match="brace"):
        Template(text)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"text": "a"}\n', r"rows.jsonl, line 1: there is no column 'summary', but: text"),
        ('{"text": "a", "summary": null}\n', "line 1: column 'summary' holds null, but must"),
        ('{"text": "a", "summary": ["b"]}\n', r"line 1: column 'summary' holds \['b'\]"),
        ("", "rows.jsonl holds no examples: give data that has some"),
        ("\n  \n", "holds no examples"),
        ('{"text": "a"', "rows.jsonl, line 1 is not JSON"),
        ("[1]\n", "line 1 is .* must be an object"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_sentence(tmp_path, content, said):
    (tmp_path / "rows.jsonl").write_text(content)
    with pytest.raises(UserError, match=said) as error:
        examples_of(str(tmp_path / "rows.jsonl"), prompt="{text}", target="{summary}")
    assert len(str(error.value)) < 300


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("r.csv", b"text,summary\na\n", "r.csv, line 2: the header has 2 columns, but"),
        ("r.csv", b"text,summary\na,b,c\n", "line 2: the header has 2 columns"),
        ("r.csv", b"text,summary\n\xff,b\n", "r.csv is not UTF-8 text"),
        ("r.csv", b"text,text,summary\na,b,c\n", "line 1: the column 'text' stands twice"),
        ("r.parquet", b"nothing", "r.parquet is not a Parquet file"),
        ("missing.csv", None, "cannot read .*missing.csv: No such file"),
        ("r.zip", b"hello", "r.zip is not a kind of file that is known: give one of .jsonl"),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path, name, content, said):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=said):
        examples_of(str(tmp_path / name), prompt="{text}", target="{summary}")


def test_what_is_neither_a_file_nor_a_name_of_the_hub():
    with pytest.raises(UserError, match="@ is no file here, and cannot be a data set of the hub"):
        examples_of("@")


def test_columns_without_a_meaning_ask_for_a_template(tmp_path):
    with pytest.raises(UserError, match="columns are a, b, which have no usual meaning: say"):
        examples_of(write(tmp_path / "r.jsonl", [{"a": "x", "b": "y"}]))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"class_labels": "yes"}, "must name two or more"),
        ({"class_labels": "yes,yes"}, "must name two or more"),
        ({"prompt": "{text"}, "lone or empty brace"),
        (
            {"prompt": "{text}" * 500_000, "target": "x"},
            "line 1: a text of .* characters, but at most 1,000,000 are read",
        ),
    ],
)
def test_a_task_that_cannot_be_meant(tmp_path, fields, said):
    with pytest.raises(UserError, match=said):
        examples_of(write(tmp_path / "r.jsonl", ROWS), **fields)


def test_an_unknown_label_is_named(tmp_path):
    file = write(tmp_path / "r.jsonl", [{"text": "a", "summary": "maybe"}])
    with pytest.raises(UserError, match="line 1: the label 'maybe' is none of yes, no"):
        examples_of(file, prompt="{text}", target="{summary}", class_labels="yes,no")


def test_a_missing_split_names_its_flag(tmp_path):
    task = task_from_config(Data(train=write(tmp_path / "r.jsonl", ROWS)))
    with pytest.raises(UserError, match="no data for validation: give --data.validation FILE"):
        task.read_corpus("validation")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("cnn", HubDataset("cnn", None, "train")),
        ("org/cnn:3.0.0", HubDataset("org/cnn", "3.0.0", "train")),
        ("org/cnn:3.0.0@test[:10%]", HubDataset("org/cnn", "3.0.0", "test[:10%]")),
    ],
)
def test_names_of_the_hub(given, expected):
    assert source_from_name(given, "train") == expected


# ---- lengths ------------------------------------------------------------------------------------
LONG = [Example("Anna took", "the red lamp"), Example("Paul took", "the")]


def test_long_targets_are_refused_cut_or_dropped():
    tokenizer = run_tokenizer()
    with pytest.raises(ValueError, match="'the red lamp' has 4 tokens .* decoder_sequence_length"):
        encode(LONG, tokenizer, 8, 3)
    cut = encode(LONG, tokenizer, 8, 3, "truncate")
    assert (len(cut), cut.truncation_counts.targets, cut.truncation_counts.dropped) == (2, 1, 0)
    assert tokenizer.decode([cut.targets[0]]) == ["the red"]
    assert cut.targets[0][-1] == tokenizer.eos_token_id
    dropped = encode(LONG, tokenizer, 8, 3, "skip")
    assert (len(dropped), dropped.truncation_counts.dropped) == (1, 1)
    assert dropped.truncation_counts.format_messages(8) == ["1 dropped, whose target is too long"]


def test_a_language_model_learns_targets_after_the_separator():
    tokenizer = run_tokenizer("gptj")
    asked = [Example(f"{e.prompt} target:", e.target) for e in LONG]
    batch = PackedSequences.from_stream(
        token_stream(asked, tokenizer, True), 16, tokenizer.pad_token_id
    ).take([0, 1])
    said = [tokenizer.hf_tokenizer.decode(row[row != -100]) for row in batch["labels"]]
    assert said == [" the red lamp<|endoftext|>", " the<|endoftext|>"]


# ---- the small tasks ----------------------------------------------------------------------------
def test_generating_again_gives_the_committed_tasks(tmp_path):
    for name in ("summaries", "places"):
        WRITERS[name](tmp_path / name)
    made = sorted(path for path in tmp_path.rglob("*.*"))
    assert len(made) == 4
    for path in made:
        committed = SAMPLE_FOLDER / path.relative_to(tmp_path)
        assert path.read_bytes() == committed.read_bytes()
