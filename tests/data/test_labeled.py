"""Labeled texts: rows in all their forms, those that break one, and their samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from config.errors import UserError
from data.labeled_samples import IS_LABELED, LABELS
from data.length_stats import measure_lengths
from data.pipeline import Pipeline
from data.pooling import POOLED_IDS
from tests.data.test_preferences import Rows, assistant, data_of, user

GOOD, BAD = {"text": "Anna took the lamp", "label": "good"}, {"text": "Adam", "label": "bad"}


# ---- rows ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("rows", "data", "classes", "labels"),
    [
        ([GOOD, BAD], {}, "bad,good", [("good",), ("bad",)]),
        ([GOOD, BAD], {"class_labels": "good,bad,fine"}, "good,bad,fine", [("good",), ("bad",)]),
        ([{"text": "a", "label": n} for n in (10, 2, -1)], {}, "2,10", [("10",), ("2",)]),
        ([{"text": "a", "label": b} for b in (True, False)], {}, "False,True",
         [("True",), ("False",)]),
        ([{"q": "a", "stars": 1}, {"q": "b", "stars": 0}],
         {"prompt": "rate: {q}", "target": "{stars}"}, "0,1", [("1",), ("0",)]),
        ([{"text": "a", "labels": ["x", "y"]}, {"text": "b", "labels": []}], {}, "x,y",
         [("x", "y"), ()]),
    ],
)  # fmt: skip
def test_classes_are_named_or_those_of_the_data(
    tmp_path: Path, rows: Rows, data: dict[str, str], classes: str, labels: list[Any]
) -> None:
    pipeline = data_of(tmp_path, "gptj_tiny", rows, "classification", **data)
    assert [e.label for e in pipeline.read_corpus("train").examples] == labels
    assert pipeline.config.data.class_labels == classes
    assert pipeline.config.training.multi_label == isinstance(rows[0].get("labels"), list)


def test_numbers(tmp_path: Path) -> None:
    rows = [{"text": "a", "label": x} for x in (1, -2.5, "3e2")]
    pipeline = data_of(tmp_path, "gptj_tiny", rows, "regression")
    assert [e.label for e in pipeline.read_corpus("train").examples] == [1.0, -2.5, 300.0]


def test_a_whole_conversation_has_a_label(tmp_path: Path) -> None:
    rows: Rows = [{"messages": [user("hi"), assistant("no")], "label": 0},
                  {"messages": [user("ho")], "label": 1}]  # fmt: skip
    tokenizer = "data/sample/chat_tokenizer"
    pipeline = data_of(tmp_path, "qwen3_tiny", rows, "classification", tokenizer=tokenizer)
    theirs = pipeline.tokenizer.hf_tokenizer
    for row, example in zip(rows, pipeline.read_corpus("train").examples, strict=True):
        assert example.prompt == theirs.apply_chat_template(row["messages"], tokenize=False)


@pytest.mark.parametrize(
    ("row", "objective", "data", "told"),
    [
        ({"text": "a"}, "classification", {}, "there is no column 'label', but: text"),
        ({"body": "a", "label": "x"}, "classification", {}, "a labeled text is in the column text"),
        ({"text": "a", "label": None}, "classification", {}, "holds null, but must hold a label"),
        ({"text": None, "label": "good"}, "classification", {}, "holds null, but must hold text"),
        ({"text": "a", "label": "ugly"}, "classification", {"class_labels": "good,bad"},
         "the label 'ugly' is none of good, bad"),
        ({"text": "a", "label": 0.5}, "classification", {}, "--training.objective regression"),
        ({"text": "a", "label": "a,b"}, "classification", {}, "has a comma"),
        ({"text": "a", "label": ["good"]}, "classification", {"class_labels": "good,bad"},
         "--training.multi_label true"),
        ({"text": "a", "label": "good"}, "classification", {"target": "{label}!"},
         "--data.target '{COLUMN}'"),
        ({"text": "a", "label": "many"}, "regression", {}, "holds 'many', but must hold a number"),
        ({"text": "a", "label": True}, "regression", {}, "must hold a number"),
        ({"text": "a", "label": 1e40}, "regression", {}, "must hold a number"),
    ],
)  # fmt: skip
def test_rows_that_break_a_form(
    tmp_path: Path, row: Any, objective: str, data: dict[str, str], told: str
) -> None:
    first = [{"text": "b", "label": 2.0}] if objective == "regression" else [GOOD, BAD]
    with pytest.raises(UserError) as raised:
        data_of(tmp_path, "gptj_tiny", [*first, row], objective, **data).read_corpus("train")
    assert told in str(raised.value)


def test_one_class_is_none_to_learn(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has one label, good"):
        data_of(tmp_path, "gptj_tiny", [GOOD], "classification").read_corpus("train")


# ---- samples ------------------------------------------------------------------------------------
@pytest.mark.parametrize("places", [1, 3])
@pytest.mark.parametrize("preset", ["tiny", "gptj_tiny", "qwen3_tiny"])
def test_samples_hold_whole_texts_as_transformers_tokenizes_them(
    tmp_path: Path, preset: str, places: int
) -> None:
    rows = [{"text": "Anna took the lamp " * n, "label": n % 3} for n in (1, 2, 3, 1, 1)]
    pipeline = data_of(
        tmp_path, preset, rows, "classification", length=40, examples_per_sample=places
    )
    samples, theirs = pipeline.make_training_samples(), pipeline.tokenizer.hf_tokenizer
    batch = samples.take(np.arange(len(samples)))
    texts, labels, found = [row["text"] for row in rows], [], []
    for row, (ids, segments) in enumerate(
        zip(batch["input_ids"], batch["segment_ids"], strict=True)
    ):
        for number in range(1, int(segments.max()) + 1):
            found.append(ids[segments == number].tolist())
            labels.append(batch[LABELS][row * places + number - 1].argmax())
    expected = [theirs(text, truncation=True, max_length=40)["input_ids"] for text in texts]
    pairs = sorted(zip(found, labels, strict=True))
    assert pairs == sorted(zip(expected, [row["label"] for row in rows], strict=True))
    assert batch[IS_LABELED].sum() == len(rows)
    pooled = batch[POOLED_IDS]
    assert (np.count_nonzero(pooled, axis=1) == (1 if preset == "tiny" and places == 1
            else batch[IS_LABELED].reshape(len(pooled), -1).sum(1))).all()  # fmt: skip
    assert measure_lengths(pipeline, ["train"]).longest == max(map(len, map(
        pipeline.tokenizer.hf_tokenizer.encode, texts)))  # fmt: skip


# ---- compared texts -----------------------------------------------------------------------------
def texts_and_margin(pipeline: Pipeline) -> tuple[list[str], Any]:
    examples = pipeline.read_corpus("train").examples
    return [example.prompt for example in examples], examples[0].label


@pytest.mark.parametrize(
    ("row", "data", "texts", "margin"),
    [
        ({"chosen": "a b", "rejected": "c"}, {}, ["a b", "c"], 0.0),
        ({"prompt": "say: ", "chosen": "a", "rejected": "b", "margin": 2}, {},
         ["say: a", "say: b"], 2.0),
        ({"q": "say", "chosen": "a", "rejected": "b", "margin": None}, {"prompt": "{q}: "},
         ["say: a", "say: b"], 0.0),
    ],
)  # fmt: skip
def test_rows_of_a_chosen_and_a_rejected_text(
    tmp_path: Path, row: Any, data: dict[str, str], texts: list[str], margin: float
) -> None:
    assert texts_and_margin(data_of(tmp_path, "gptj_tiny", [row], "reward", **data)) == (
        texts, margin)  # fmt: skip


def test_rows_of_conversations(tmp_path: Path) -> None:
    asked = [user("hi")]
    whole = {"chosen": [*asked, assistant("yes")], "rejected": [*asked, assistant("no")]}
    apart = {"prompt": asked, "chosen": [assistant("yes")], "rejected": [assistant("no")]}
    for row in (whole, apart):
        pipeline = data_of(
            tmp_path, "qwen3_tiny", [row], "reward", tokenizer="data/sample/chat_tokenizer"
        )
        theirs = pipeline.tokenizer.hf_tokenizer
        expected = [theirs.apply_chat_template(whole[n], tokenize=False) for n in whole]
        assert texts_and_margin(pipeline)[0] == expected


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"prompt": "a", "chosen": "b"}, "a reward needs chosen and rejected"),
        ({"chosen": "b", "rejected": None}, "holds null"),
        ({"chosen": "b", "rejected": "c", "margin": "large"}, "holds 'large', but must hold a num"),
    ],
)
def test_rows_that_compare_nothing(tmp_path: Path, row: Any, told: str) -> None:
    with pytest.raises(UserError) as raised:
        data_of(tmp_path, "gptj_tiny", [row], "reward").read_corpus("train")
    assert told in str(raised.value)


@pytest.mark.parametrize("places", [1, 2])
@pytest.mark.parametrize("preset", ["tiny", "gptj_tiny"])
def test_both_texts_are_in_a_sample_and_end_with_the_end_token(
    tmp_path: Path, preset: str, places: int
) -> None:
    rows = [{"chosen": "lamp " * n, "rejected": "cat", "margin": n} for n in (1, 2, 1)]
    pipeline = data_of(tmp_path, preset, rows, "reward", length=48, examples_per_sample=places)
    samples, theirs = pipeline.make_training_samples(), pipeline.tokenizer.hf_tokenizer
    batch = samples.take(np.arange(len(samples)))
    assert batch[IS_LABELED].sum() == len(rows)
    end = [] if preset == "tiny" else [pipeline.tokenizer.eos_token_id]
    found = []
    for row, (ids, segments) in enumerate(
        zip(batch["input_ids"], batch["segment_ids"], strict=True)
    ):
        for pair in range(int(segments.max()) // 2):
            texts = [ids[segments == 2 * pair + j].tolist() for j in (1, 2)]
            found.append((batch[LABELS][row * places + pair, 0], texts))
    expected = [(r["margin"], [theirs(r[n])["input_ids"] + end for n in ("chosen", "rejected")])
                for r in rows]  # fmt: skip
    assert sorted(found) == sorted(expected)


def test_pairs_that_do_not_fit_are_refused_or_dropped(tmp_path: Path) -> None:
    rows = [{"chosen": "lamp " * n, "rejected": "cat"} for n in (1, 60)]
    with pytest.raises(UserError, match="the two texts have"):
        data_of(tmp_path, "gptj_tiny", rows, "reward").make_training_samples()
    skipping = data_of(tmp_path, "gptj_tiny", rows, "reward", on_long_target="skip")
    assert len(skipping.make_training_samples()) == 1
