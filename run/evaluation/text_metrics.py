"""Metrics of generated texts: exact match, F1, ROUGE-L, BLEU and chrF."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

from data.examples import Languages

if TYPE_CHECKING:
    from sacrebleu import BLEU, CHRF

Texts = Sequence[str]
NO_LABEL = "no label"
"""Prediction for an answer that is no label."""


def exact_match(generated: Texts, expected: Texts) -> float:
    """Fraction of texts that equal the expected text, apart from surrounding whitespace."""
    equal = [a.strip() == b.strip() for a, b in zip(generated, expected, strict=True)]
    return sum(equal) / len(equal)


def macro_f1(generated: Texts, expected: Texts) -> float:
    """Macro-averaged F1 score over labels, from 0 to 1.

    Labels count that are expected or answered, as in scikit-learn.

    Args:
        generated: labels, or `NO_LABEL`.
    """
    right, answers = Counter[str](), Counter(generated)
    for answer, label in zip(generated, expected, strict=True):
        right[label] += answer == label
    labels = {*answers, *expected} - {NO_LABEL}
    both = answers + Counter(expected)
    return sum(2 * right[label] / both[label] for label in labels) / len(labels)


def rouge_l(generated: Texts, expected: Texts) -> float:
    """ROUGE-L F-measure (longest common subsequence of words), from 0 to 1.

    Lin, "ROUGE: A Package for Automatic Evaluation of Summaries", 2004, as Google's rouge-score
    computes it, with stemming. It sees letters and digits of ASCII only.
    """
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rougeL"], use_stemmer=True)
    scores = [
        scorer.score(b, a)["rougeL"].fmeasure for a, b in zip(generated, expected, strict=True)
    ]
    return sum(scores) / len(scores)


def make_sacrebleu_metric(name: str, language: str | None = None) -> BLEU | CHRF:
    """Create the metric `bleu` or `chrf` for texts in a language.

    BLEU: Papineni et al., "BLEU: a Method for Automatic Evaluation of Machine Translation", 2002;
    chrF: Popovic, "chrF: character n-gram F-score for automatic MT evaluation", 2015. Both are
    corpus scores from 0 to 100, as sacrebleu computes them (Post, arXiv:1804.08771).
    """
    import sacrebleu

    if name == "chrf":
        return sacrebleu.CHRF()
    return sacrebleu.BLEU(tokenize=bleu_tokenizer(language))


def bleu_tokenizer(language: str | None) -> str:
    """Name of sacrebleu's tokenizer for a language: words, or characters where none separates them.

    Args:
        language: a code such as zh, zho_Hans or zh_CN; None: unknown.
    """
    name = "" if language is None else language.replace("-", "_").partition("_")[0]
    if name in ("zh", "zho", "cmn", "yue"):
        return "zh"
    if name in ("ja", "jpn"):
        return "ja-mecab" if find_spec("MeCab") and find_spec("ipadic") else "char"
    if name in ("ko", "kor") and find_spec("mecab_ko"):
        return "ko-mecab"
    return "13a"


class SacrebleuScore(NamedTuple):
    """Score of texts, and the signature that says how sacrebleu computed it."""

    score: float
    signature: str


SACREBLEU_METRICS = ("bleu", "chrf")


def sacrebleu_scores(
    name: str, generated: Texts, expected: Texts, languages: Sequence[Languages]
) -> dict[str, SacrebleuScore]:
    """Compute `bleu` or `chrf` of each direction of translation, such as `eng_Latn-deu_Latn`.

    Args:
        languages: of each text; texts without languages have the direction `all`.
    """
    scores = {}
    for direction in dict.fromkeys(languages):
        texts = [
            pair
            for pair, own in zip(zip(generated, expected, strict=True), languages, strict=True)
            if own == direction
        ]
        metric = make_sacrebleu_metric(name, direction.target)
        score = metric.corpus_score([a for a, _ in texts], [[b for _, b in texts]]).score
        title = "-".join(filter(None, direction)) or "all"
        scores[title] = SacrebleuScore(float(score), str(metric.get_signature()))
    return scores


TEXT_METRICS: dict[str, Callable[[Texts, Texts], float]] = {
    "accuracy": exact_match,
    "macro_f1": macro_f1,
    "exact_match": exact_match,
    "rouge_l": rouge_l,
}
"""Metrics of texts by name, besides sacrebleu's; labels are without surrounding whitespace."""

ANSWER_METRICS = (*TEXT_METRICS, *SACREBLEU_METRICS)
"""Names of all metrics of generated texts."""
