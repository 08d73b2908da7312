"""Labels: names, numbers, truth values, ClassLabel columns; one rule, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

import run_finetuning
import run_validation
from config.sections import Data
from data.sources import DataError
from data.task import task_from_config
from tests.small_runs import MODEL, TRAINING, random_model


def written(folder: Path, rows: list[dict[str, Any]], name: str = "rows.jsonl") -> str:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / name)


def answers(folder: Path, values: list[Any], labels: str | None, target: str = "{l}") -> list[str]:
    rows = [{"t": f"text {i}", "l": value} for i, value in enumerate(values)]
    data = Data(train=written(folder, rows), prompt="{t}", target=target, class_labels=labels)
    return [example.target for example in task_from_config(data).read_corpus("train").examples]


@pytest.mark.parametrize(
    ("labels", "values", "expected"),
    [
        ("no,yes", ["yes", 0, 1, "1", 1.0, "0.0"], ["yes", "no", "yes", "yes", "yes", "no"]),
        ("no,yes", ["yes", -1, "-1", -1.0], ["yes"]),
        ("-1,0,1", [-1, 0, 1, "1", -1.0], ["-1", "0", "1", "1", "-1"]),
        ("1,2,3", [1, 2, 3, 3.0, "2", -1], ["1", "2", "3", "3", "2"]),
        ("0.5,1.0", [0.5, 1, "1.00"], ["0.5", "1.0", "1.0"]),
        ("0,unknown", [0, "unknown", -1], ["0", "unknown"]),
        ("false,true", [True, False, "True", "FALSE"], ["true", "false", "true", "false"]),
        ("True,False", [True, "false"], ["True", "False"]),
        ("not entailment, entailment", ["entailment", 0], ["entailment", "not entailment"]),
        ("no,yes", [" yes", "no\n"], [" yes", "no\n"]),
    ],
)  # fmt: skip
def test_a_value_is_a_name_or_a_number(labels, values, expected, tmp_path):
    assert answers(tmp_path, values, labels) == expected
    framed = [f" {answer}" for answer in expected]
    assert answers(tmp_path, values, labels, " {l}") == framed
    assert answers(tmp_path, values, f" {labels.replace(',', ' , ')} ") == expected


@pytest.mark.parametrize(
    ("labels", "value", "said"),
    [
        ("1,2,3", 0, "the label '0' is none of 1, 2, 3: names that are numbers are not numbered"),
        ("0,unknown", 1, "the label '1' is none of 0, unknown: names that are numbers are not"),
        ("no,yes", 2, "the label '2' is none of no, yes: 2 labels are numbered from 0"),
        ("no,yes", -2, "the label '-2' is none of no, yes"),
        ("no,yes", 0.5, "the label '0.5' is none of no, yes"),
        ("no,yes", True, "the label 'true' is none of no, yes: name them false,true to label"),
        ("true,maybe", False, "the label 'false' is none of true, maybe"),
        ("no,yes", "Yes", "the label 'Yes' is none of no, yes"),
        ("no,yes", "", "the label '' is none of no, yes"),
        ("no,yes", "1e9", "the label '1e9' is none of no, yes"),
        ("no,yes", "1" * 400, "is none of no, yes"),
        ("1,1.0", 1, "of the labels 1, 1.0, two are the same number"),
    ],
)
def test_what_means_none_or_two_is_refused(labels, value, said, tmp_path):
    with pytest.raises(DataError, match=r"^[^\n]{1,400}$") as info:
        answers(tmp_path, [value], labels)
    assert said in str(info.value)


def test_part_of_a_target_is_a_name_alone(tmp_path):
    """The number in "class 1" is no index; nor are two columns."""
    assert answers(tmp_path, [1], "class 0,class 1", "class {l}") == ["class 1"]
    assert answers(tmp_path, ["yes"], "yes.,no.", "{l}.") == ["yes."]
    for target in ("class {l}", "{l}{l}", "{l}!"):
        with pytest.raises(DataError, match="is none of no, yes"):
            answers(tmp_path, [0], "no,yes", target)


# ---- data sets that name their labels -----------------------------------------------------------
def dataset(names: list[str], values: list[int]) -> datasets.Dataset:
    features = datasets.Features(
        {"t": datasets.Value("string"), "l": datasets.ClassLabel(names=names)}
    )
    rows = {"t": [f"text {i}" for i in range(len(values))], "l": values}
    return datasets.Dataset.from_dict(rows, features=features)


def saved(folder: Path, how: str, names: list[str], values: list[int], split: str) -> str:
    one = dataset(names, values)
    if how == "parquet":
        one.to_parquet(folder / f"{split}.parquet")
        return str(folder / f"{split}.parquet")
    one.save_to_disk(folder / split)
    return str(folder / split)


@pytest.mark.parametrize("how", ["save_to_disk", "parquet"])
@pytest.mark.parametrize(
    ("names", "labels", "expected"),
    [
        (["neg", "pos"], None, ["pos", "neg", "pos"]),
        (["neg", "pos"], "pos,neg", ["pos", "neg", "pos"]),
        (["neg", "pos"], "bad,good", ["good", "bad", "good"]),
        (["1", "2"], None, ["2", "1", "2"]),
        (["false", "true"], "true,false", ["true", "false", "true"]),
    ],
)
def test_class_labels_have_names(how, names, labels, expected, tmp_path):
    train = saved(tmp_path, how, names, [1, 0, -1, 1], "train")
    validation = saved(tmp_path, how, names[::-1], [0, 1, -1, 0], "validation")
    data = Data(train=train, validation=validation, prompt="{t}", target="{l}", class_labels=labels)
    task = task_from_config(data)
    assert task.metric_names == ("accuracy", "macro_f1")
    assert {*(task.labels or ())} == {*expected}
    found = task.read_corpus("train")
    assert [example.target for example in found.examples] == expected
    assert found.unlabeled == 1
    if labels != "bad,good":  # renamed by position: each split by its own
        of_validation = task_from_config(data).read_corpus("validation").examples
        assert [example.target for example in of_validation] == expected


def test_class_labels_that_differ_are_refused(tmp_path):
    train = saved(tmp_path, "parquet", ["neg", "pos"], [1, 0], "train")
    other = saved(tmp_path, "parquet", ["bad", "good"], [1, 0], "validation")
    for data, split in (
        (Data(train=train, prompt="{t}", target="{l}", class_labels="a,b,c"), "train"),
        (Data(train=train, validation=other, prompt="{t}", target="{l}"), "validation"),
        (Data(train=f"{train},{other}", prompt="{t}", target="{l}"), "train"),
    ):
        with pytest.raises(DataError, match=r"has (the|other) labels"):
            task_from_config(data).read_corpus(split)


# ---- a split without labels ---------------------------------------------------------------------
def test_a_split_without_a_label_is_one_sentence(tmp_path, capsys):
    """As GLUE's test split is."""
    rows = [{"t": f"text {i}", "l": -1} for i in range(9)]
    given = written(tmp_path, rows)
    known = written(tmp_path, [{**row, "l": 1} for row in rows], "known.jsonl")
    flags = ("--data.prompt", "{t}", "--data.target", "{l}", "--data.class_labels", "no,yes")
    model = random_model(tmp_path / "model", *MODEL)
    train, validation = ("--data.train", given), ("--data.validation", given)
    for main, data in (
        (run_finetuning.main, train),
        (run_finetuning.main, (*train, "--data.validation", "0.2")),
        (run_finetuning.main, ("--data.train", known, *validation)),
        (run_validation.main, validation),
    ):
        assert main([*TRAINING, "--load", str(model), *flags, *data]) == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert f"9 rows of {given} are without a label (-1), and none is left" in said


def test_a_split_of_nulls_is_one_sentence(tmp_path):
    rows = [{"t": "text", "l": None}] * 3
    for validation in (None, "0.5"):
        data = Data(train=written(tmp_path, rows), validation=validation, prompt="{t}",
                    target="{l}", class_labels="no,yes", on_null="skip")  # fmt: skip
        with pytest.raises(DataError, match="all 3 rows of .* have null where text is needed"):
            task_from_config(data).read_corpus("train")
