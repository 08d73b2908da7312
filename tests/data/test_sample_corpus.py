"""The committed sample corpus: its form, its splits, and that no sentence alone gives it away."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression

from data.sample import (
    generate,
    generate_conversations,
    generate_translations,
    train_tokenizer,
)
from data.sample.__main__ import ROWS, WRITERS
from data.sample.vocabulary import ATTRIBUTES, PEOPLE, THINGS
from data.task import NLI_LABELS, SAMPLE_FOLDER
from tests.data.corpora import sample_tokenizer

MAX_BY_ONE_SENTENCE = 0.45  # accuracy; guessing gets 0.33
MIN_PAIRS = {"train": 12_000, "validation": 2_000}


@pytest.fixture(scope="module")
def rows() -> dict[str, list[dict[str, Any]]]:
    return {
        split: [
            json.loads(line)
            for line in (SAMPLE_FOLDER / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
        ]
        for split in MIN_PAIRS
    }


@pytest.mark.parametrize("split", MIN_PAIRS)
def test_rows_have_mnli_s_schema(rows: dict[str, list[dict[str, Any]]], split: str) -> None:
    assert len(rows[split]) >= MIN_PAIRS[split]
    for index, row in enumerate(rows[split]):
        assert {key: type(value) for key, value in row.items()} == {
            "premise": str,
            "hypothesis": str,
            "label": int,
            "idx": int,
        }
        assert row["idx"] == index


@pytest.mark.parametrize("split", MIN_PAIRS)
def test_labels_are_balanced(rows: dict[str, list[dict[str, Any]]], split: str) -> None:
    third = len(rows[split]) / 3
    assert Counter(row["label"] for row in rows[split]) == {0: third, 1: third, 2: third}


def test_splits_share_no_sentence(rows: dict[str, list[dict[str, Any]]]) -> None:
    for part in ("premise", "hypothesis"):
        train, validation = ({row[part] for row in rows[split]} for split in MIN_PAIRS)
        assert not train & validation
    for split in MIN_PAIRS:
        pairs = {(row["premise"], row["hypothesis"]) for row in rows[split]}
        assert len(pairs) == len(rows[split]), "a pair appears twice"


def test_no_person_meets_a_thing_in_both_splits(rows: dict[str, list[dict[str, Any]]]) -> None:
    def scenes(split: str) -> set[tuple[str, str]]:
        sentences = (row[part] for row in rows[split] for part in ("premise", "hypothesis"))
        words = (set(sentence.rstrip(".").split()) for sentence in sentences)
        return {
            (person, thing)
            for sentence in words
            for person in sentence.intersection(PEOPLE)
            for thing in sentence.intersection(THINGS)
        }

    train, validation = scenes("train"), scenes("validation")
    assert not train & validation
    assert len(train | validation) == len(PEOPLE) * len(THINGS), "every combination is used"


@pytest.mark.parametrize("part", ["hypothesis", "premise"])
def test_one_sentence_does_not_give_the_label_away(
    rows: dict[str, list[dict[str, Any]]], part: str
) -> None:
    counter = CountVectorizer(ngram_range=(1, 2))
    counts = counter.fit_transform(row[part] for row in rows["train"])
    model = LogisticRegression(max_iter=200).fit(counts, [row["label"] for row in rows["train"]])
    unseen = counter.transform(row[part] for row in rows["validation"])
    accuracy = model.score(unseen, [row["label"] for row in rows["validation"]])
    assert accuracy < MAX_BY_ONE_SENTENCE


def test_labels_follow_from_the_meaning(rows: dict[str, list[dict[str, Any]]]) -> None:
    """Derive every label from the two texts, knowing only which phrases exclude one another."""
    for row in rows["validation"]:
        assert NLI_LABELS[row["label"]] == _relation(row["premise"], row["hypothesis"]), row


def _relation(premise: str, hypothesis: str) -> str:
    p, h = (f" {text.rstrip('.')} " for text in (premise, hypothesis))
    for known in (PEOPLE, THINGS):
        if [word for word in known if f" {word} " in p] != [w for w in known if f" {w} " in h]:
            return "neutral"
    for attribute in ATTRIBUTES.values():
        claims = attribute.make_value_claims() + attribute.make_group_claims()
        claimed = [claim for claim in claims if f" {claim.text} " in h]
        stated = [v for v in attribute.possible_values if f" {attribute.phrase.format(v)} " in p]
        if claimed and stated:
            holds = stated[0] in claimed[0].true_of
            return "entailment" if holds == (" not " not in h) else "contradiction"
    return "neutral"


def test_generating_again_gives_the_committed_files(tmp_path: Path) -> None:
    """Of the corpus and of all other samples; the tokenizers are compared where they are used."""
    for name in ROWS:
        WRITERS[name](tmp_path / name)
        for committed in (SAMPLE_FOLDER / name).glob("*.jsonl"):
            assert (tmp_path / name / committed.name).read_bytes() == committed.read_bytes()


@pytest.mark.parametrize("name", ["chat_tokenizer", "translation_tokenizer"])
def test_training_a_tokenizer_again_gives_the_committed_files(name: str, tmp_path: Path) -> None:
    WRITERS[name](tmp_path)
    for file in (SAMPLE_FOLDER / name).iterdir():
        assert (tmp_path / file.name).read_bytes() == file.read_bytes()


def test_another_seed_gives_another_corpus() -> None:
    first, second = (next(generate.generate_examples("train", seed)) for seed in (1, 2))
    assert first != second


def test_training_the_tokenizer_again_gives_the_committed_vocabulary() -> None:
    again = train_tokenizer.build_tokenizer()
    assert again.get_vocab() == sample_tokenizer().get_vocab()


# ---- conversations ------------------------------------------------------------------------------
def test_translations_are_in_the_words_of_their_languages() -> None:
    """Each sentence has one in each language, and no sentence is in both splits."""
    sources = {}
    for split in MIN_PAIRS:
        rows = list(generate_translations.generate_translation_rows(split))
        sources[split] = {row["source"] for row in rows}
        assert len(rows) == 2 * len(sources[split])
        for row in rows:
            german = row["target_language"] == "deu_Latn"
            article = r"(den|die|das) \w+(e|en) [A-Z]" if german else r"(le|la) [a-z]"
            assert re.search(f" {article}", row["target"]), row
    assert not sources["train"] & sources["validation"]


def test_answers_of_conversations_are_in_what_was_told() -> None:
    """And no question of the validation split has been seen with what was told before it."""
    found: dict[str, set[str]] = {}
    for split in MIN_PAIRS:
        for row in generate_conversations.generate_conversation_rows(split):
            texts = [m["content"] for m in row["messages"] if m["role"] != "system"]
            told = texts[0].casefold()
            for answer in texts[1::2]:
                *_, last = answer.rstrip(".").removesuffix(" did").split()
                assert last.casefold() in told or answer in ("You did not say.", "unknown")
            found.setdefault(split, set()).add(texts[0].partition(".")[0])
    assert not found["train"] & found["validation"]
