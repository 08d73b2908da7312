"""Policy gradients from stored rollouts: GRPO, DAPO, Dr. GRPO, GSPO and RLOO.

A completion's advantage multiplies the ratio of its probability to that by the policy that wrote
it, which is clipped. The formulas are TRL 1.16's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

import popxl
from config.metrics import MetricSums
from config.objectives import OBJECTIVES, REWARD_SQUARES
from data.preference_samples import NUM_LOSS_TOKENS, SEGMENT_IDS
from data.rollout_samples import (
    ADVANTAGES,
    COMPLETION_LENGTHS,
    HAS_EQUAL_REWARDS,
    IS_TRUNCATED,
    OLD_LOGPS,
    REF_LOGPS,
    REWARDS,
)
from data.samples import IGNORE_INDEX, Batch
from modelling.objectives.objective import Objective, sequence_rows
from modelling.objectives.sequence_logps import label_logps, sum_by_sequence
from popxl import Tensor, TensorSpec, ops

if TYPE_CHECKING:
    from config.sections import RunConfig
    from modelling.layers.activation_layout import ActivationLayout
    from modelling.layers.parallel import ParallelGroups

MAX_LOG_RATIO = 60.0
"""Bound on the logarithm of a ratio, so that products with it stay finite in float32."""


@dataclass(frozen=True)
class PolicyLoss:
    """Ratio of a policy gradient, and the mean that its loss is.

    Attributes:
        ratio: of each token's probability; of a completion's, or its geometric mean over tokens.
        mean_over: tokens of the global batch; completions, of whose tokens a mean is taken first;
            completions, divided by `training.max_completion_length`.
    """

    ratio: Literal["token", "completion", "mean"]
    mean_over: Literal["tokens", "completions", "max_completion_length"]


POLICY_LOSSES: Mapping[str, PolicyLoss] = {
    "grpo": PolicyLoss("token", "completions"),
    "dapo": PolicyLoss("token", "tokens"),
    "dr_grpo": PolicyLoss("token", "max_completion_length"),
    "gspo": PolicyLoss("mean", "completions"),
    "rloo": PolicyLoss("completion", "completions"),
}

# Columns of the statistics.
_BELOW_HIGH, _ABOVE_LOW, _LOG_RATIO = "ratio, at most its bound", "at least its bound", "log ratio"
_ENTROPY, _KL, _NUM_LOW, _NUM_HIGH = "entropy", "KL divergence", "low ratios", "high ratios"


class PolicyGradient(Objective):
    """Clipped policy gradient of a batch of rollouts; see `data.rollout_samples`.

    RLOO's KL divergence is a part of its rewards, that of the others of the loss, in which it is
    weighted by the ratio.
    """

    returns_stats = True
    absent_values = {  # noqa: RUF012
        "labels": IGNORE_INDEX, NUM_LOSS_TOKENS: 0, ADVANTAGES: 0, COMPLETION_LENGTHS: 0
    }  # fmt: skip

    def __init__(self, config: RunConfig) -> None:
        training = config.training
        self.name, self.policy_loss = training.objective, POLICY_LOSSES[training.objective]
        self._low, self._high = 1 - training.epsilon, 1 + training.resolved_epsilon_high
        self._beta, self._temperature = training.resolved_beta, training.temperature
        self._max_length = training.max_completion_length
        self._is_token_ratio = self.policy_loss.ratio == "token"
        self._has_kl_loss = bool(self._beta) and self.name != "rloo"
        metrics = OBJECTIVES[self.name].metrics
        self.metrics = {name: fn for name, fn in metrics.items() if self._beta or name != "kl"}
        self._sequences = n = config.max_sequences_per_sample

        def as_float(labels: TensorSpec) -> TensorSpec:
            return TensorSpec(labels.shape, popxl.float32)

        self.token_inputs = {"labels": lambda labels: labels, OLD_LOGPS: as_float}
        if self._has_kl_loss:
            self.token_inputs[REF_LOGPS] = as_float
        if n > 1:
            self.token_inputs[SEGMENT_IDS] = lambda labels: labels
        self.sequence_inputs = dict.fromkeys((ADVANTAGES, NUM_LOSS_TOKENS), sequence_rows(n, 1))
        ratios = [_BELOW_HIGH, _ABOVE_LOW, _NUM_LOW, _NUM_HIGH]
        self._columns = [
            *(ratios if self._is_token_ratio else [_LOG_RATIO]),
            _ENTROPY,
            *([_KL] if self._has_kl_loss else []),
        ]

    def loss_stats(
        self,
        logits: Tensor,
        inputs: Mapping[str, Tensor],
        layout: ActivationLayout,
        groups: ParallelGroups,
    ) -> Tensor:
        """Sums ratios, entropies and KL divergences of each sequence: float32 (sequences, n)."""
        labels = inputs["labels"]
        if self._temperature != 1:
            logits = logits * (1 / self._temperature)
        is_ignored = ops.equal(labels, popxl.constant(IGNORE_INDEX, popxl.int32))
        is_label = ops.cast(ops.logical_not(is_ignored), popxl.float32)
        logps = label_logps(logits, labels, layout, groups)
        entropies = layout.transpose_if_sequence_first(token_entropies(logits, groups))
        log_ratios = (logps - inputs[OLD_LOGPS]) * is_label
        values = {_ENTROPY: entropies * is_label, _LOG_RATIO: log_ratios}
        if self._is_token_ratio:
            ratios = _bounded_exp(log_ratios)
            below, above = self._clip_ratios(ratios)
            values |= {_BELOW_HIGH: below * is_label, _ABOVE_LOW: above * is_label}
            low, high = (popxl.constant(x, popxl.float32) for x in (self._low, self._high))
            values[_NUM_LOW] = ops.cast(ops.greater(low, ops.detach(ratios)), popxl.float32)
            values[_NUM_HIGH] = ops.cast(ops.greater(ops.detach(ratios), high), popxl.float32)
        if self._has_kl_loss:
            to_ref = (inputs[REF_LOGPS] - logps) * is_label
            kl = _bounded_exp(to_ref) - to_ref - 1.0
            values[_KL] = kl * ratios if self._is_token_ratio else kl
        sums = [
            sum_by_sequence(values[name], inputs.get(SEGMENT_IDS), self._sequences).reshape((-1, 1))
            for name in self._columns
        ]
        return ops.concat(sums, 1)

    def loss(self, stats: Tensor, inputs: Mapping[str, Tensor], groups: ParallelGroups) -> Tensor:
        sums = dict(zip(self._columns, ops.split(stats, len(self._columns), 1), strict=True))
        advantages, num_tokens = inputs[ADVANTAGES], inputs[NUM_LOSS_TOKENS]
        lengths = ops.clip(num_tokens, min=1.0)
        if self._is_token_ratio:
            below, above = sums[_BELOW_HIGH], sums[_ABOVE_LOW]
        else:
            log_ratios = sums[_LOG_RATIO]
            is_mean = self.policy_loss.ratio == "mean"
            ratios = _bounded_exp(log_ratios / lengths if is_mean else log_ratios)
            below, above = self._clip_ratios(ratios)
        losses = -ops.clip(advantages, min=0.0) * below - ops.clip(advantages, max=0.0) * above
        if self._has_kl_loss:
            kl = sums[_KL] if self._is_token_ratio else sums[_KL] / lengths * ratios
            losses = losses + kl * self._beta
        if self.name == "grpo":
            losses = losses / lengths
        elif self.name == "gspo":  # nothing is in the loss of a masked completion
            losses = losses * ops.clip(num_tokens, max=1.0)
        return ops.sum(losses)

    def _clip_ratios(self, ratios: Tensor) -> tuple[Tensor, Tensor]:
        """Clips ratios from above, for positive advantages, and from below, for negative ones."""
        return ops.clip(ratios, max=self._high), ops.clip(ratios, min=self._low)

    # ---- on the host ------------------------------------------------------------------------
    def normalizer(self, batch: Batch) -> int:
        if self.policy_loss.mean_over == "tokens":
            return int(batch[NUM_LOSS_TOKENS].sum())
        completions = int(np.count_nonzero(batch[COMPLETION_LENGTHS]))
        per_completion = self.policy_loss.mean_over == "max_completion_length"
        return completions * (self._max_length if per_completion else 1)

    def metric_sums(self, stats: np.ndarray, batch: Batch) -> MetricSums:
        """Returns sums and counts of rewards, lengths, ratios and KL divergences, as TRL's.

        Args:
            stats: float32, (sequences, n) in any shape.
        """
        lengths = batch[COMPLETION_LENGTHS].astype(np.float64)[:, 0]
        is_present = lengths > 0
        lengths = lengths[is_present]
        array = stats.reshape(-1, len(self._columns)).astype(np.float64)[is_present]
        sums = dict(zip(self._columns, array.T, strict=True))
        tokens = batch[NUM_LOSS_TOKENS].astype(np.float64)[is_present, 0]
        rewards = batch[REWARDS].astype(np.float64)[is_present, 0]
        rewards = rewards[~np.isnan(rewards)]
        values = {
            "reward": rewards,
            REWARD_SQUARES: rewards**2,
            "frac_reward_zero_std": batch[HAS_EQUAL_REWARDS][is_present, 0],
            "completions/mean_length": lengths,
            "completions/clipped_ratio": batch[IS_TRUNCATED][is_present, 0],
        }
        means = {name: (float(np.sum(v)), float(len(v))) for name, v in values.items()}
        for name, extreme in (("min", np.min), ("max", np.max)):
            value = float(extreme(lengths)) if len(lengths) else 0.0
            means[f"completions/{name}_length"] = (value, float(len(lengths) > 0))
        per_token = {"entropy": sums[_ENTROPY]} | self._kl_sums(sums, tokens, batch)
        means |= {name: (float(np.sum(v)), float(tokens.sum())) for name, v in per_token.items()}
        low, high, count = self._count_clipped(sums, tokens)
        advantages = batch[ADVANTAGES][is_present, 0]
        low, high = low * (advantages < 0), high * (advantages > 0)
        for name, v in (("low", low), ("high", high), ("region", low + high)):
            means[f"clip_ratio/{name}_mean"] = (float(np.sum(v)), count)
        return means

    def _count_clipped(
        self, sums: Mapping[str, np.ndarray], tokens: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, float]:
        """Numbers of ratios below and above the bounds in each completion, and of all ratios."""
        if self._is_token_ratio:
            return sums[_NUM_LOW], sums[_NUM_HIGH], float(tokens.sum())
        ratios = self._sequence_ratios(sums, tokens)
        return (ratios < self._low) * 1.0, (ratios > self._high) * 1.0, float(len(ratios))

    def _sequence_ratios(self, sums: Mapping[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
        lengths = np.maximum(tokens, 1) if self.policy_loss.ratio == "mean" else 1
        return np.exp(np.minimum(sums[_LOG_RATIO] / lengths, MAX_LOG_RATIO))

    def _kl_sums(
        self, sums: Mapping[str, np.ndarray], tokens: np.ndarray, batch: Batch
    ) -> dict[str, np.ndarray]:
        """KL divergence of each completion, if it is used: of the loss, or of RLOO's rewards."""
        if not self._beta:
            return {}
        if not self._has_kl_loss:
            is_label = batch["labels"] != IGNORE_INDEX
            return {"kl": (batch[OLD_LOGPS] - batch[REF_LOGPS])[is_label].astype(np.float64)}
        ratios = 1 if self._is_token_ratio else self._sequence_ratios(sums, tokens)
        return {"kl": sums[_KL] * ratios}


def token_entropies(logits: Tensor, groups: ParallelGroups) -> Tensor:
    """Computes the entropy of each token's distribution in nats, without a gradient.

    Args:
        logits: float32 (batch, length, local vocab size).

    Returns:
        float32 (batch, length), in the layout of the logits.
    """
    logits = ops.detach(logits)
    largest = ops.max(logits, -1, keepdims=True)
    if groups.tensor_parallel > 1:
        largest = ops.collectives.replicated_all_reduce(largest, "max", groups.tp)
    shifted = logits - largest
    weights = ops.exp(shifted)
    total, weighted = ops.sum(weights, -1), ops.sum(weights * shifted, -1)
    if groups.tensor_parallel > 1:
        total = ops.collectives.replicated_all_reduce(total, "add", groups.tp)
        weighted = ops.collectives.replicated_all_reduce(weighted, "add", groups.tp)
    return ops.log(total) - weighted / total


def _bounded_exp(x: Tensor) -> Tensor:
    return ops.exp(ops.clip(x, max=MAX_LOG_RATIO))
