"""Evaluation metrics of each training objective's loss, and of generated answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Literal

MetricSums = Mapping[str, tuple[float, float]]
"""By name, a sum and what it is divided by: those of two batches add up."""


def add_metric_sums(first_sums: MetricSums, second_sums: MetricSums) -> MetricSums:
    """Returns the metric sums (sum and count by metric) of two batches, added."""
    none = (0.0, 0.0)
    pairs = {
        name: (first_sums.get(name, none), second_sums.get(name, none))
        for name in {**first_sums, **second_sums}
    }
    return {name: (a[0] + b[0], a[1] + b[1]) for name, (a, b) in pairs.items()}


def compute_metric_mean(name: str, metric_sums: MetricSums) -> float:
    """Returns the mean of a metric; NaN if its count is 0."""
    total, count = metric_sums.get(name, (0.0, 0.0))
    return total / count if count else math.nan


def _mean_loss(metric_sums: MetricSums) -> float:
    """Returns the mean loss; 0 if there are no loss tokens."""
    return metric_sums["loss"][0] / max(metric_sums["loss"][1], 1)


def _perplexity(metric_sums: MetricSums) -> float:
    """Returns the perplexity, exp(mean loss); infinity on overflow."""
    try:
        return math.exp(_mean_loss(metric_sums))
    except OverflowError:
        return math.inf


def _mean_reward_margin(metric_sums: MetricSums) -> float:
    return compute_metric_mean("rewards/chosen", metric_sums) - compute_metric_mean(
        "rewards/rejected", metric_sums
    )


Metrics = Mapping[str, Callable[[MetricSums], float]]

LOGPS = ("logps/chosen", "logps/rejected")
REWARDS = ("rewards/chosen", "rewards/rejected")

PAIRS: Metrics = {
    "loss": _mean_loss,
    **{name: partial(compute_metric_mean, name) for name in (*REWARDS, "rewards/accuracies")},
    "rewards/margins": _mean_reward_margin,
    **{name: partial(compute_metric_mean, name) for name in LOGPS},
}
"""Metrics of preferences in pairs, in TRL's names."""

OBJECTIVES: Mapping[str, Metrics] = {
    "cross_entropy": {"loss": _mean_loss, "perplexity": _perplexity},
    **dict.fromkeys(("dpo", "ipo", "hinge", "simpo", "orpo", "cpo"), PAIRS),
    "kto": {**{n: f for n, f in PAIRS.items() if n != "rewards/accuracies"},
            "kl": lambda metric_sums: max(compute_metric_mean("kl", metric_sums), 0.0)},
}  # fmt: skip
"""The metrics of each objective, from the tally of an evaluation."""

_ANSWER_METRICS = ("accuracy", "macro_f1", "exact_match", "rouge_l", "bleu", "chrf")
_HIGHER_IS_BETTER = {*REWARDS[:1], *LOGPS[:1], "rewards/margins", "rewards/accuracies"}
METRICS = {
    **{name: name in _HIGHER_IS_BETTER for metrics in OBJECTIVES.values() for name in metrics},
    **dict.fromkeys(_ANSWER_METRICS, True),
}
"""All metrics, and whether more is better."""

if TYPE_CHECKING:
    MetricName = str
    ObjectiveName = str
else:
    MetricName = Literal[tuple(METRICS)]
    ObjectiveName = Literal[tuple(OBJECTIVES)]
