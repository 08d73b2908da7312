"""Sums of evaluation metrics over batches, and the metrics that are computed from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

MetricSums = Mapping[str, tuple[float, float]]
"""By name, a sum and what it is divided by: those of two batches add up.

`EXTREMES` have the extreme value and 1, or 0 without a value.
"""

EXTREMES: Mapping[str, Callable[..., tuple[float, float]]] = {
    "completions/min_length": min,
    "completions/max_length": max,
}
"""Metrics of which those of two batches do not add up, with the function that combines them."""


def add_metric_sums(first_sums: MetricSums, second_sums: MetricSums) -> MetricSums:
    """Returns the metric sums of two batches together."""
    none = (0.0, 0.0)
    return {
        name: _add_terms(name, first_sums.get(name, none), second_sums.get(name, none))
        for name in {**first_sums, **second_sums}
    }


def _add_terms(name: str, a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
    extreme = EXTREMES.get(name)
    if extreme is None:
        return a[0] + b[0], a[1] + b[1]
    return extreme((term for term in (a, b) if term[1]), default=a)


def compute_metric_mean(name: str, metric_sums: MetricSums) -> float:
    """Returns the mean of a metric; NaN if its count is 0."""
    total, count = metric_sums.get(name, (0.0, 0.0))
    return total / count if count else math.nan


def mean_loss(metric_sums: MetricSums) -> float:
    """Returns the mean loss; 0 if there are no loss tokens."""
    return metric_sums["loss"][0] / max(metric_sums["loss"][1], 1)


def perplexity(metric_sums: MetricSums) -> float:
    """Returns the perplexity, exp(mean loss); infinity on overflow."""
    try:
        return math.exp(mean_loss(metric_sums))
    except OverflowError:
        return math.inf


def macro_f1(metric_sums: MetricSums) -> float:
    """Returns the mean F1 of the classes that occur, expected or predicted; NaN without any."""
    counts = [value for name, value in metric_sums.items() if name.startswith("f1/") and value[1]]
    return sum(2 * right / total for right, total in counts) / len(counts) if counts else math.nan


def pearson(metric_sums: MetricSums) -> float:
    """Returns Pearson's correlation of predictions and labels; NaN where one of them is constant.

    From the sums of `modelling.objectives.pooled.regression_metric_sums`.
    """
    x, y, xx, yy, xy = (
        compute_metric_mean(f"moment/{name}", metric_sums) for name in ("x", "y", "xx", "yy", "xy")
    )
    variance = (xx - x * x) * (yy - y * y)
    return (xy - x * y) / math.sqrt(variance) if variance > 0 else math.nan


Metrics = Mapping[str, Callable[[MetricSums], float]]
"""By name, the metric as a function of an evaluation's metric sums."""

ANSWER_METRICS = ("accuracy", "macro_f1", "exact_match", "rouge_l", "bleu", "chrf")
"""Metrics of generated answers."""

RETRIEVAL_METRICS = ("recall@1", "recall@5", "recall@10", "ndcg@10")
"""Metrics of embeddings: how many of an anchor's positives are among the nearest documents."""
