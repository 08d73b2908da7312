"""Contrastive data: rows in all their forms, those that break one, and samples of whole texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from config.errors import ConfigError
from config.presets import load_config
from data.length_stats import measure_lengths
from data.packing import EMPTY_SLOT
from data.pipeline import Pipeline
from data.sources import DataError
from data.token_sequences import TokenSequences
from tests.data.test_preferences import KINDS, Rows
from tests.small_runs import vocabulary


def data_of(
    tmp_path: Path, rows: Rows, preset: str = "gptj_tiny", length: int = 64, **settings: Any
) -> Pipeline:
    """The data of rows; `settings` are fields of training and data."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config_class, sample_format = KINDS[preset]
    names = {"negatives", "pooling", "bidirectional"} & settings.keys()
    training = {name: settings.pop(name) for name in names}
    packing = {} if preset == "tiny" else {"packing": False, "separator": ""}
    sections = {
        "data": {"dataset": "sample", "train": str(file), "validation": None} | packing | settings,
        "training": {"objective": "contrastive"} | training,
        "model": vocabulary(config_class, 640) | {"sequence_length": length},
    }
    return Pipeline(load_config(config_class, "finetuning", preset, sections), sample_format)


def texts_of(data: Pipeline) -> list[str]:
    return [example.target for example in data.read_corpus("train").examples]


# ---- rows ---------------------------------------------------------------------------------------
PAIR = {"anchor": "a cat", "positive": "an animal"}


@pytest.mark.parametrize(
    ("more", "negatives", "expected"),
    [
        ({}, 0, []),
        ({}, 2, ["", ""]),
        ({"negative": "a lamp"}, 1, ["a lamp"]),
        ({"negative": "a lamp"}, 0, []),
        ({"negative_10": "c", "negative_2": "b", "negative_1": "a"}, 3, ["a", "b", "c"]),
        ({"negatives": ["a", "b"]}, 2, ["a", "b"]),
        ({"negatives": ["a", "", None, "b"], "negative_1": None}, 3, ["a", "b", ""]),
        ({"negatives": ["a", "b", "c"]}, 1, ["a"]),
        ({"negatives": "a", "negative": 7}, 2, ["a", "7"]),
    ],
)
def test_rows_with_negatives(tmp_path, more, negatives, expected) -> None:
    data = data_of(tmp_path, [PAIR | more], negatives=negatives)
    assert texts_of(data) == ["a cat", "an animal", *expected]


def test_templates_render_all_texts(tmp_path: Path) -> None:
    row = {"q": "cat", "d": "animal", "negative": "lamp"}
    data = data_of(tmp_path, [row], negatives=1, prompt="query: {q}", target="passage: {d}")
    assert texts_of(data) == ["query: cat", "passage: animal", "passage: lamp"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"anchor": "a"}, "the columns are anchor, but contrastive rows have positive: name others "
         "by --data.prompt '{query}' --data.target '{document}'"),
        ({"text": "a"}, "the columns are text, but contrastive rows have anchor and positive"),
        ({"anchor": None, "positive": "b"}, "column 'anchor' holds null, but must hold text: "
         "--data.on_null skip leaves such rows out"),
        ({"anchor": " ", "positive": "b"}, "the anchor is empty, but must be a text"),
        ({"anchor": "a", "positive": ""}, "the positive is empty, but must be a text"),
        ({"anchor": ["a"], "positive": "b"}, "column 'anchor' holds ['a'], but must hold text"),
        (PAIR | {"negatives": {"a": 1}},
         "column 'negatives' holds {'a': 1}, but must hold a list of texts"),
        (PAIR | {"negatives": [["a"]]}, "column 'negatives[0]' holds ['a'], but must hold text"),
        (PAIR | {"negative_2": {}}, "column 'negative_2' holds {}, but must hold text"),
    ],
)  # fmt: skip
def test_rows_that_are_none(tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(DataError) as error:
        data_of(tmp_path, [PAIR, row], negatives=1).read_corpus("train")
    assert f"rows.jsonl, line 2: {message}" in str(error.value).replace(
        "rows.jsonl:2", "rows.jsonl, line 2"
    )


def test_a_template_of_several_columns_writes_no_negatives(tmp_path: Path) -> None:
    row = {"q": "a", "title": "b", "body": "c", "negative": "d"}
    data = data_of(tmp_path, [row], negatives=1, prompt="{q}", target="{title}: {body}")
    with pytest.raises(DataError, match="must have one column, but has title, body"):
        data.read_corpus("train")


def test_null_rows_can_be_skipped_and_conversations_are_none(tmp_path: Path) -> None:
    rows: Rows = [{"anchor": None, "positive": "b"}, PAIR]
    assert texts_of(data_of(tmp_path, rows, on_null="skip")) == ["a cat", "an animal"]
    with pytest.raises(ConfigError, match="contrastive rows are texts: leave out data.format"):
        data_of(tmp_path, rows, format="conversational")


def test_built_in_tasks_have_no_contrastive_rows(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the task sample has no contrastive rows: give --data.tra"):
        data_of(tmp_path, [PAIR], train=None).read_corpus("train")


def test_what_is_not_read_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = PAIR | {"negative_1": "a", "negative_2": "b", "score": 3}
    data_of(tmp_path, [row, row], negatives=1).make_training_samples()
    printed = capsys.readouterr().err
    assert "columns that are not read: score (2 rows, such as" in printed
    assert (
        "rows have more than training.negatives, which are not read: negatives (2 rows" in printed
    )
    assert printed.count("negative_") == 0


# ---- samples ------------------------------------------------------------------------------------
def texts_in(samples: TokenSequences, data: Pipeline) -> list[list[str]]:
    """The texts of each sample by place; "" where there is none."""
    batch, found = samples.take(np.arange(len(samples))), list[list[str]]()
    for ids, numbers in zip(batch["input_ids"], batch["segment_ids"], strict=True):
        places = [ids[numbers == place + 1] for place in range(samples.slots.shape[1])]
        found.append(data.tokenizer.decode([tokens.tolist() for tokens in places]))
    return found


ROWS: Rows = [
    {"anchor": "Anna took", "positive": "the lamp", "negatives": ["a cat", "the bus"]},
    {"anchor": "Ben", "positive": "the book"},
    {"anchor": "Mia went", "positive": "home", "negative": "the garden"},
]
TEXTS = [
    ["Anna took", "the lamp", "a cat", "the bus"],
    ["Ben", "the book", "", ""],
    ["Mia went", "home", "the garden", ""],
]


@pytest.mark.parametrize("preset", KINDS)
def test_a_sample_holds_the_texts_of_a_row_in_fixed_places(tmp_path: Path, preset: str) -> None:
    data = data_of(tmp_path, ROWS, preset, negatives=2, examples_per_sample=1)
    samples: Any = data.make_training_samples()
    assert texts_in(samples, data) == TEXTS
    assert (samples.slots != EMPTY_SLOT).all()


@pytest.mark.parametrize("preset", KINDS)
def test_packed_rows_keep_their_places(tmp_path: Path, preset: str) -> None:
    data = data_of(tmp_path, ROWS, preset, 100, negatives=2, examples_per_sample=2)
    samples: Any = data.make_training_samples()
    found = [row[i : i + 4] for row in texts_in(samples, data) for i in (0, 4)]
    assert len(samples) == 2
    assert sorted(row for row in found if any(row)) == sorted(TEXTS)


@pytest.mark.parametrize("pooling", ["mean", "last", "eos"])
def test_pooled_tokens(tmp_path: Path, pooling: str) -> None:
    data = data_of(tmp_path, ROWS, negatives=2, pooling=pooling, examples_per_sample=1)
    batch = data.make_training_samples().take(np.arange(3))
    pooled, numbers = batch["pooled_ids"], batch["segment_ids"]
    for place in (1, 2):
        (columns,) = np.nonzero(numbers[0] == place)
        expected = columns if pooling == "mean" else columns[-1:]
        np.testing.assert_array_equal(np.nonzero(pooled[0] == place)[0], expected)
        end = batch["input_ids"][0, columns[-1]] == data.tokenizer.eos_token_id
        assert end == (pooling == "eos")


def test_rows_that_are_too_long(tmp_path: Path) -> None:
    rows: Rows = [{"anchor": "a", "positive": " b" * 30, "negative": "c d"}, PAIR]
    with pytest.raises(ConfigError, match=r"the texts of a row have \d+ tokens together, but seq"):
        data_of(tmp_path, rows, length=24, negatives=1).make_training_samples()
    skipping = data_of(tmp_path, rows, length=24, negatives=1, on_long_target="skip")
    samples: Any = skipping.make_training_samples()
    assert (len(samples), samples.truncation_counts.dropped) == (1, 1)
    cutting = data_of(tmp_path, rows, length=24, negatives=1, on_long_target="truncate",
                      pooling="eos", examples_per_sample=1)  # fmt: skip
    samples = cutting.make_training_samples()
    assert samples.truncation_counts.prompts == 1
    batch = samples.take(np.arange(1))
    assert np.count_nonzero(batch["segment_ids"]) == 24
    anchor, positive, negative = (
        batch["input_ids"][0][batch["segment_ids"][0] == i] for i in (1, 2, 3)
    )
    assert len(positive) > len(negative) > len(anchor)
    assert positive[-1] == cutting.tokenizer.eos_token_id, "the end token stays"


def test_lengths_are_of_rows(tmp_path: Path) -> None:
    data = data_of(tmp_path, ROWS, negatives=2, examples_per_sample=1)
    samples: Any = data.make_training_samples()
    lengths = measure_lengths(data, ["train"])
    assert lengths.examples == 3
    assert lengths.longest == max(samples.lengths)
