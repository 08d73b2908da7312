"""Metrics of an evaluation: those of the loss, which an objective's record has, and of answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal


def _perplexity(loss: float) -> float:
    """Infinite where it overflows."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


OBJECTIVES: Mapping[str, Mapping[str, Callable[[float], float]]] = {
    "cross_entropy": {"loss": float, "perplexity": _perplexity},
}
"""The metrics of each objective, from the mean loss: less is better."""

METRICS = {
    **{name: False for metrics in OBJECTIVES.values() for name in metrics},
    **dict.fromkeys(("accuracy", "exact_match", "rouge_l", "bleu"), True),
}
"""All metrics, and whether more is better."""

if TYPE_CHECKING:
    MetricName = str
else:
    MetricName = Literal[tuple(METRICS)]
