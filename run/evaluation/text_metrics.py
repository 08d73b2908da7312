"""Metrics of generated texts: exact match, F1, ROUGE-L and BLEU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

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


def bleu(generated: Texts, expected: Texts) -> float:
    """Corpus BLEU, from 0 to 100.

    Papineni et al., "BLEU: a Method for Automatic Evaluation of Machine Translation", 2002, as
    sacrebleu computes it by default (Post, arXiv:1804.08771).
    """
    import sacrebleu

    return float(sacrebleu.corpus_bleu(list(generated), [list(expected)]).score)


TEXT_METRICS: dict[str, Callable[[Texts, Texts], float]] = {
    "accuracy": exact_match,
    "macro_f1": macro_f1,
    "exact_match": exact_match,
    "rouge_l": rouge_l,
    "bleu": bleu,
}
"""Metrics of generated texts by name; labels are without surrounding whitespace."""
