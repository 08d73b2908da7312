"""Files of rows as people have them: compressed, several, of Excel, with holes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from config.errors import UserError
from config.task import Data
from data.sources import DataError, source_from_name
from data.task import task_from_config

ROWS = [{"prompt": f"question {i}, or; more", "completion": f"answer {i}"} for i in range(40)]


def written(folder: Path, name: str, rows: list[dict] = ROWS) -> str:
    path, name = folder / name, name.lower()
    if ".csv" in name or ".tsv" in name:
        separator = {"semicolon.csv": ";", "tab.csv": "\t", "rows.tsv": "\t"}.get(name, ",")
        lines = [separator.join(f'"{v}"' for v in row.values()) for row in rows]
        text = "\n".join([separator.join(rows[0]), *lines, ""])
    elif ".jsonl" in name:
        text = "".join(json.dumps(row) + "\n" for row in rows)
    else:
        text = json.dumps(rows)
    content = text.encode("utf-8-sig" if "csv" in name else "utf-8")
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return str(path)


def rows_of(given: str) -> list[dict]:
    return [dict(row) for _, row in source_from_name(given, "train").read_rows()]


@pytest.mark.parametrize(
    "name",
    [
        *("rows.jsonl", "rows.json", "rows.csv", "rows.tsv", "semicolon.csv", "tab.csv"),
        *("rows.jsonl.gz", "rows.json.gz", "rows.csv.gz", "ROWS.JSONL.GZ"),
    ],
)
def test_each_kind_of_file_has_the_same_rows(tmp_path, name):
    assert rows_of(written(tmp_path, name)) == ROWS


def test_json_lines_in_a_file_called_json(tmp_path):
    Path(written(tmp_path, "rows.jsonl")).rename(tmp_path / "rows.json")
    assert rows_of(str(tmp_path / "rows.json")) == ROWS
    with (tmp_path / "rows.json").open("a") as file:
        file.write('{"prompt": \n')
    with pytest.raises(UserError, match=r"rows\.json, line 41 is not JSON"):
        rows_of(str(tmp_path / "rows.json"))


def test_names_of_columns_have_no_space_around_them(tmp_path):
    (tmp_path / "spaced.csv").write_text("prompt, completion\na,b\n")
    assert rows_of(str(tmp_path / "spaced.csv")) == [{"prompt": "a", "completion": "b"}]


def test_a_csv_of_one_column_has_commas_in_it(tmp_path):
    (tmp_path / "one.csv").write_text('text\n"a; b, c"\n')
    assert rows_of(str(tmp_path / "one.csv")) == [{"text": "a; b, c"}]


def test_several_files_and_patterns(tmp_path, monkeypatch):
    for name, part in (("b.jsonl", ROWS[20:]), ("a.jsonl", ROWS[:20])):
        written(tmp_path, name, part)
    monkeypatch.chdir(tmp_path)
    assert rows_of("*.jsonl") == ROWS
    assert rows_of("b.jsonl, a.jsonl") == ROWS[20:] + ROWS[:20]
    assert rows_of("a.jsonl,b*.jsonl") == ROWS
    written(tmp_path, "odd, [name].jsonl", ROWS[:3])
    assert rows_of("odd, [name].jsonl") == ROWS[:3]
    with pytest.raises(DataError, match=r"no file fits the pattern x\*\.jsonl"):
        rows_of("a.jsonl,x*.jsonl")
    with pytest.raises(UserError, match=r"cannot read nope\.jsonl: No such file"):
        rows_of("a.jsonl,nope.jsonl")


@pytest.mark.parametrize("name", ["nope.json", "./nope", "/nope", "data/nope.csv.gz"])
def test_a_missing_file_is_no_data_set_of_the_hub(name):
    with pytest.raises(UserError, match=r"cannot read|is no file here"):
        rows_of(name)


@pytest.mark.parametrize("kind", [".jsonl.gz", ".json.gz", ".csv.gz"])
@pytest.mark.parametrize("damage", [lambda b: b[:-20], lambda b: b[:12] + b"\0\1\2" + b[15:],
                                    lambda b: b"no gzip"])  # fmt: skip
def test_damaged_gzip_is_one_sentence(tmp_path, kind, damage):
    path = Path(written(tmp_path, f"rows{kind}"))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=r"is damaged|cannot read"):
        rows_of(str(path))


# ---- what rows hold -----------------------------------------------------------------------------
def corpus(folder: Path, rows: list[dict], split: str = "train", **data: str):
    given = Data(train=written(folder, "own.jsonl", rows), **data)
    return task_from_config(given).read_corpus(split)


def test_truth_values_are_text(tmp_path):
    rows = [{"prompt": "a", "completion": True}, {"prompt": False, "completion": "b"}]
    found = corpus(tmp_path, rows).examples
    assert [e[:2] for e in found] == [("a", "true"), ("false", "b")]
    labels = corpus(tmp_path, rows[:1] * 2, class_labels="false,true").examples
    assert {e.target for e in labels} == {"true"}


def test_nulls(tmp_path):
    rows = [*ROWS[:3], {"prompt": None, "completion": "b"}, {"prompt": "a", "completion": None}]
    with pytest.raises(DataError, match="line 4: column 'prompt' holds null.*on_null skip"):
        corpus(tmp_path, rows)
    skipped = corpus(tmp_path, rows, on_null="skip")
    assert len(skipped.examples) == 3
    assert skipped.dropped_row_messages == ["2 with null left out"]
    empty = corpus(tmp_path, rows, on_null="empty")
    assert [e[:2] for e in empty.examples[3:]] == [("", "b"), ("a", "")]


def test_a_fraction_of_the_training_data_is_held_out(tmp_path):
    rows = [{"prompt": f"question {i}", "completion": "yes"} for i in range(400)]
    train, validation = (
        corpus(tmp_path, rows, s, validation="0.1") for s in ("train", "validation")
    )
    both = [e.prompt for e in train.examples + validation.examples]
    assert sorted(both) == sorted(row["prompt"] for row in rows)
    assert 20 < len(validation.examples) < 60
    # Neither the order of rows nor others among them matter, and equal prompts stay together.
    more = [*rows[::-1], *rows[:50], {"prompt": "new", "completion": "no"}]
    again = corpus(tmp_path, more, "validation", validation="0.1").examples
    assert {e.prompt for e in again} - {"new"} == {e.prompt for e in validation.examples}


@pytest.mark.parametrize("fraction", ["0", "1", "-0.1", "1.5", "nan"])
def test_what_is_no_fraction_is_refused(tmp_path, fraction):
    with pytest.raises(DataError, match="between 0 and 1"):
        corpus(tmp_path, ROWS, validation=fraction)
    with pytest.raises(DataError, match="leaves none for validation"):
        corpus(tmp_path, ROWS, "validation", validation="1e-9")


def test_a_fraction_of_the_sample_corpus():
    sample = Data(dataset="sample", validation="0.01")
    assert 100 < len(task_from_config(sample).read_corpus("validation").examples) < 200
