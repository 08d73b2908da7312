"""The training objectives: their metrics, and the rows that they learn from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from config.metrics import (
    ANSWER_METRICS,
    RETRIEVAL_METRICS,
    Metrics,
    MetricSums,
    compute_metric_mean,
    macro_f1,
    mean_loss,
    pearson,
    perplexity,
)

RowType = Literal["paired", "unpaired", "labeled", "scored", "compared", "contrastive", "rollout"]
"""Rows of an objective that learns from more than texts.

paired: a chosen and a rejected answer; unpaired: single answers, liked or not; labeled: texts with
classes; scored: texts with a number; compared: a chosen and a rejected text, with a margin;
contrastive: an anchor, a positive and negatives; rollout: completions with rewards.
"""

ROW_PAIRS: tuple[RowType, ...] = ("paired", "compared")
"""Types of rows that have two texts."""

LABELED: tuple[RowType, ...] = ("labeled", "scored")
"""Types of rows with a label."""

WHOLE_TEXTS: tuple[RowType, ...] = (*LABELED, "compared", "contrastive")
"""Types of rows whose texts are read as a whole, none of whose tokens are in the loss."""

HeadType = Literal["lm", "classifier", "none"]
"""Heads of a model: lm: logits of the next token; classifier: scores of sequences; none: the
vectors of sequences are the output."""


@dataclass(frozen=True)
class ObjectiveSpec:
    """Facts of a training objective.

    Attributes:
        metrics: of an evaluation, as functions of its metric sums.
        row_type: type of the rows that it learns from; None: texts.
        higher_is_better: names of the metrics of which more is better.
        settings: fields of `Training` that it reads and some other objective does not.
        default_beta: `training.beta` where it is null.
        head: head of the model.
        needs_whole_batch: True if the loss compares all samples of an optimizer step.
    """

    metrics: Metrics
    row_type: RowType | None = None
    higher_is_better: Set[str] = frozenset()
    settings: Set[str] = frozenset()
    default_beta: float = 0.0
    needs_whole_batch: bool = False
    head: HeadType = "lm"


def _mean_reward_margin(metric_sums: MetricSums) -> float:
    return compute_metric_mean("rewards/chosen", metric_sums) - compute_metric_mean(
        "rewards/rejected", metric_sums
    )


_LOGPS = ("logps/chosen", "logps/rejected")
_REWARDS = ("rewards/chosen", "rewards/rejected")

_PAIR_METRICS: Metrics = {
    "loss": mean_loss,
    **{name: partial(compute_metric_mean, name) for name in (*_REWARDS, "rewards/accuracies")},
    "rewards/margins": _mean_reward_margin,
    **{name: partial(compute_metric_mean, name) for name in _LOGPS},
}
"""Metrics of preferences in pairs, in TRL's names."""

_KTO_METRICS: Metrics = {
    **{name: fn for name, fn in _PAIR_METRICS.items() if name != "rewards/accuracies"},
    "kl": lambda metric_sums: max(compute_metric_mean("kl", metric_sums), 0.0),
}

_HIGHER_IS_BETTER = {_REWARDS[0], _LOGPS[0], "rewards/margins", "rewards/accuracies"}

_REFERENCE, _SMOOTHING = "reference_cache", "label_smoothing"

REWARD_SQUARES = "reward_squares"
"""Metric sum of the squared rewards, for their standard deviation."""


def _reward_std(metric_sums: MetricSums) -> float:
    """Returns the standard deviation of rewards, unbiased; NaN below two rewards."""
    (total, count), (squares, _) = metric_sums["reward"], metric_sums[REWARD_SQUARES]
    if count < 2:
        return math.nan
    return math.sqrt(max(squares - total**2 / count, 0.0) / (count - 1))


POLICY_GRADIENT_METRICS: Metrics = {
    "loss": mean_loss,
    "reward": partial(compute_metric_mean, "reward"),
    "reward_std": _reward_std,
    **{
        name: partial(compute_metric_mean, name)
        for name in (
            "frac_reward_zero_std",
            *("completions/mean_length", "completions/min_length", "completions/max_length"),
            *("completions/clipped_ratio", "entropy", "kl"),
            *("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"),
        )
    },
}
"""Metrics of policy gradients, in TRL's names; kl only with `training.beta`."""


def _policy_gradient_spec(*settings: str, default_beta: float = 0.0) -> ObjectiveSpec:
    common = {"beta", "epsilon", "epsilon_high", "scale_rewards", "mask_truncated_completions"}
    common |= {"temperature", _REFERENCE, *settings}
    return ObjectiveSpec(POLICY_GRADIENT_METRICS, "rollout", {"reward"}, common, default_beta)


def _preference_spec(
    *settings: str, metrics: Metrics = _PAIR_METRICS, row_type: RowType = "paired"
) -> ObjectiveSpec:
    return ObjectiveSpec(metrics, row_type, _HIGHER_IS_BETTER, {"beta", *settings}, 0.1)


CROSS_ENTROPY_METRIC, KD_LOSS = "cross_entropy", "kd_loss"
"""Metrics of distillation: the labels' cross-entropy, and the divergence from the teacher."""


def _distillation_perplexity(metric_sums: MetricSums) -> float:
    return perplexity({"loss": metric_sums.get(CROSS_ENTROPY_METRIC, (0.0, 0.0))})


_DISTILLATION_METRICS: Metrics = {
    "loss": mean_loss,
    **{name: partial(compute_metric_mean, name) for name in (KD_LOSS, CROSS_ENTROPY_METRIC)},
    "perplexity": _distillation_perplexity,
}
_TEACHER = {"teacher", "teacher_quantization"}
_TOP_TOKENS = {"beta", "top_k", "temperature", "distill_weight", "distill_rest", "teacher_cache"}

_REWARD_METRICS = ("accuracy", "margin", "mean_reward", "min_reward", "max_reward")
"""Metrics of reward models, in TRL's names; the last two are means over batches."""

OBJECTIVES: Mapping[str, ObjectiveSpec] = {
    "cross_entropy": ObjectiveSpec(
        {"loss": mean_loss, "perplexity": perplexity}, settings={_SMOOTHING}
    ),
    "dpo": _preference_spec(_REFERENCE, _SMOOTHING),
    "ipo": _preference_spec(_REFERENCE),
    "hinge": _preference_spec(_REFERENCE),
    "simpo": _preference_spec("gamma", _SMOOTHING),
    "orpo": _preference_spec(),
    "cpo": _preference_spec(_SMOOTHING),
    "distill": ObjectiveSpec(_DISTILLATION_METRICS, settings=_TEACHER | _TOP_TOKENS),
    "kto": _preference_spec(_REFERENCE, metrics=_KTO_METRICS, row_type="unpaired"),
    "classification": ObjectiveSpec(
        {
            "loss": mean_loss,
            "accuracy": partial(compute_metric_mean, "accuracy"),
            "macro_f1": macro_f1,
        },
        "labeled",
        {"accuracy", "macro_f1"},
        {"multi_label"},
        head="classifier",
    ),
    "reward": ObjectiveSpec(
        {
            "loss": mean_loss,
            **{name: partial(compute_metric_mean, name) for name in _REWARD_METRICS},
        },
        "compared",
        {"accuracy", "margin"},
        {"center_rewards_coefficient"},
        head="classifier",
    ),
    "regression": ObjectiveSpec(
        {"loss": mean_loss, "mae": partial(compute_metric_mean, "mae"), "pearson": pearson},
        "scored",
        {"pearson"},
        head="classifier",
    ),
    "contrastive": ObjectiveSpec(
        {"loss": mean_loss},
        "contrastive",
        settings={"pooling", "scale", "symmetric", "bidirectional", "negatives"},
        needs_whole_batch=True,
        head="none",
    ),
    "grpo": _policy_gradient_spec(),
    "dapo": _policy_gradient_spec(),
    "dr_grpo": _policy_gradient_spec("max_completion_length"),
    "gspo": _policy_gradient_spec(),
    "rloo": _policy_gradient_spec(default_beta=0.05),
}

METRICS: Mapping[str, bool] = {
    **{
        name: name in spec.higher_is_better for spec in OBJECTIVES.values() for name in spec.metrics
    },
    **dict.fromkeys((*ANSWER_METRICS, *RETRIEVAL_METRICS), True),
}
"""All metrics, and whether more is better."""

if TYPE_CHECKING:
    MetricName = str
    ObjectiveName = str
else:
    MetricName = Literal[tuple(METRICS)]
    ObjectiveName = Literal[tuple(OBJECTIVES)]
