"""Metrics of translations: sacrebleu's scores by direction, with each language's tokenizer."""

from __future__ import annotations

import random

import pytest
import sacrebleu

from data.examples import NO_LANGUAGES, Languages
from run.evaluation import text_metrics
from run.evaluation.text_metrics import bleu_tokenizer, sacrebleu_scores


def draw_texts(alphabet: str, seed: int) -> tuple[list[str], list[str]]:
    rng = random.Random(seed)
    expected = ["".join(rng.choices(alphabet, k=30)) for _ in range(20)]
    generated = [
        "".join(c if rng.random() < 0.9 else rng.choice(alphabet) for c in text)
        for text in expected
    ]
    return generated, expected


@pytest.mark.parametrize("name", ["bleu", "chrf"])
@pytest.mark.parametrize(
    ("alphabet", "language", "tokenize"),
    [
        ("abcd  .,", "deu_Latn", "13a"),
        ("我喜欢你们吗。", "zho_Hans", "zh"),
        ("私はあなたが。", "ja", "char"),
    ],
)
def test_scores_are_sacrebleus(alphabet: str, language: str, tokenize: str, name: str) -> None:
    texts = draw_texts(alphabet, 1)
    directions = [Languages("en", language)] * 20
    (title, (score, signature)), *others = sacrebleu_scores(name, *texts, directions).items()
    assert (title, others) == (f"en-{language}", [])
    if name == "bleu":
        expected = sacrebleu.corpus_bleu(texts[0], [texts[1]], tokenize=tokenize).score
        assert f"|tok:{tokenize}|" in signature
    else:
        expected = sacrebleu.corpus_chrf(texts[0], [texts[1]]).score
    assert 0 < score == expected < 100
    assert signature.endswith(f"version:{sacrebleu.__version__}")


def test_each_direction_has_its_score() -> None:
    generated, expected = draw_texts("abcd  .,", 2)
    directions = [Languages("en", "de"), Languages("de", "en")] * 10
    scores = sacrebleu_scores("bleu", generated, expected, directions)
    alone = [sacrebleu.corpus_bleu(generated[i::2], [expected[i::2]]).score for i in range(2)]
    assert [scores["en-de"].score, scores["de-en"].score] == alone
    together = sacrebleu_scores("bleu", generated, expected, [NO_LANGUAGES] * 20)
    assert list(together) == ["all"]


@pytest.mark.parametrize(
    ("language", "tokenizer"),
    [
        ("zh_CN", "zh"), ("yue_Hant", "zh"), ("zh", "zh"), ("jpn_Jpan", "ja-mecab"),
        ("ja_XX", "ja-mecab"), ("kor_Hang", "ko-mecab"), ("eng_Latn", "13a"), ("zhx", "13a"),
        (None, "13a"),
    ],
)  # fmt: skip
def test_languages_without_spaces_have_tokenizers_of_their_own(
    language: str | None, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_metrics, "find_spec", lambda name: name)
    assert bleu_tokenizer(language) == tokenizer
