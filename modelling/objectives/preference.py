"""Preference objectives: DPO, IPO, hinge, SimPO, ORPO, CPO and KTO.

Losses are functions of the log-probabilities of whole answers, minus those of the reference model
or not, summed over the answer's tokens or averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

import popxl
from config.metrics import MetricSums
from config.objectives import OBJECTIVES
from data.preference_samples import (
    KTO_LABELS,
    NUM_LOSS_TOKENS,
    REF_LOGPS,
    SEGMENT_IDS,
)
from data.samples import IGNORE_INDEX, Batch
from modelling.objectives.objective import Objective, sequence_rows
from modelling.objectives.sequence_logps import label_logps, sum_by_sequence
from popxl import Tensor, ops

if TYPE_CHECKING:
    from config.sections import RunConfig
    from config.training import Training
    from modelling.layers.activation_layout import ActivationLayout
    from modelling.layers.parallel import ParallelGroups


@dataclass(frozen=True)
class PairLogps:
    """Log-probabilities of the preference pairs of a micro-batch; all float32 (pairs, 1).

    Attributes:
        chosen, rejected: log-probabilities of the answers, minus the reference model's if the
            objective uses it; summed over tokens, or their mean.
        kto_labels: of KTO: 1 for desirable answers, -1 for undesirable ones; else None.
        is_present: 1, or 0 if a sample has fewer pairs.
    """

    chosen: Tensor
    rejected: Tensor
    kto_labels: Tensor | None
    is_present: Tensor

    @property
    def margin(self) -> Tensor:
        """Log-probability of the chosen answer minus that of the rejected one."""
        return self.chosen - self.rejected


PairLossFn = Callable[[PairLogps, "Training", "ParallelGroups"], Tensor]
"""Returns the loss of each pair, float32 (pairs, 1)."""


@dataclass(frozen=True)
class PreferenceLoss:
    """Loss function of a preference objective, and the log-probabilities (sum or mean) it takes.

    Attributes:
        fn: see `PairLossFn`.
        uses_ref_model: True if the reference model's log-probabilities are subtracted.
        averages_tokens: True if an answer's log-probability is the mean over its tokens.
    """

    fn: PairLossFn
    uses_ref_model: bool = True
    averages_tokens: bool = False


def log_sigmoid(x: Tensor) -> Tensor:
    """Computes log(sigmoid(x)): (n, 1) -> the same shape.

    One formula for all x, so that the gradient at 0, where training starts, is 1/2.
    """
    zero = popxl.constant(np.zeros(x.shape), x.dtype, "zero")
    return -ops.logsumexp(ops.concat([zero, -x], 1), 1, keepdims=True)


def _log_odds(log_p: Tensor) -> Tensor:
    """Computes log(p / (1 - p)) from log(p) < 0; 1 - p is exact for p near 1."""
    t = ops.tanh(log_p * 0.5)
    return log_p - ops.log(t * -2.0 / (1.0 - t))


def _dpo_loss(pair: PairLogps, training: Training, groups: ParallelGroups) -> Tensor:
    return _smoothed_sigmoid_loss(pair.margin * training.resolved_beta, training.label_smoothing)


def _smoothed_sigmoid_loss(logits: Tensor, smoothing: float) -> Tensor:
    loss = log_sigmoid(logits) * (smoothing - 1.0)
    return loss - log_sigmoid(-logits) * smoothing if smoothing else loss


def _ipo_loss(pair: PairLogps, training: Training, groups: ParallelGroups) -> Tensor:
    error = pair.margin - 1.0 / (2.0 * training.resolved_beta)
    return error * error


def _hinge_loss(pair: PairLogps, training: Training, groups: ParallelGroups) -> Tensor:
    return ops.relu(1.0 - pair.margin * training.resolved_beta)


def _simpo_loss(pair: PairLogps, training: Training, groups: ParallelGroups) -> Tensor:
    return _smoothed_sigmoid_loss(
        pair.margin * training.resolved_beta - training.gamma, training.label_smoothing
    )


def _orpo_loss(pair: PairLogps, training: Training, groups: ParallelGroups) -> Tensor:
    log_odds_ratio = _log_odds(pair.chosen) - _log_odds(pair.rejected)
    return -pair.chosen - log_sigmoid(log_odds_ratio) * training.resolved_beta


def _kto_loss(pair: PairLogps, training: Training, groups: ParallelGroups) -> Tensor:
    """KTO's loss; `rejected` is the log-probability of another example's answer to the prompt.

    Its mean over the samples of all data-parallel replicas estimates the KL divergence of the
    policy from the reference.
    """
    assert pair.kto_labels is not None
    sums = ops.concat([ops.sum(pair.rejected * pair.is_present, [0], True),
                       ops.sum(pair.is_present, [0], True)], 1)  # fmt: skip
    sums = ops.detach(sums)
    if groups.data_parallel > 1:
        sums = ops.collectives.replicated_all_reduce(sums, "add", groups.dp)
    total, count = ops.split(sums, 2, 1)
    kl = ops.relu(total / ops.maximum(count, popxl.constant(1.0, popxl.float32)))
    return 1.0 - ops.exp(log_sigmoid(pair.kto_labels * (pair.chosen - kl) * training.resolved_beta))


PREFERENCE_LOSSES: Mapping[str, PreferenceLoss] = {
    "dpo": PreferenceLoss(_dpo_loss),
    "ipo": PreferenceLoss(_ipo_loss, averages_tokens=True),
    "hinge": PreferenceLoss(_hinge_loss),
    "simpo": PreferenceLoss(_simpo_loss, uses_ref_model=False, averages_tokens=True),
    "orpo": PreferenceLoss(_orpo_loss, uses_ref_model=False, averages_tokens=True),
    "cpo": PreferenceLoss(_dpo_loss, uses_ref_model=False),
    "kto": PreferenceLoss(_kto_loss),
}


class PreferenceObjective(Objective):
    """Mean loss over preference pairs; see `data.preference_samples`.

    CPO adds the mean negative log-likelihood of the chosen answers' tokens; ORPO's loss has it.
    """

    returns_stats = True
    absent_values = {"labels": IGNORE_INDEX, NUM_LOSS_TOKENS: 0}  # noqa: RUF012

    def __init__(self, config: RunConfig) -> None:
        self._training = config.training
        self.name = config.training.objective
        self.preference_loss = PREFERENCE_LOSSES[self.name]
        self.metrics = OBJECTIVES[self.name].metrics
        self._sequences_per_sample = n = config.max_sequences_per_sample
        self.token_inputs = {"labels": lambda labels: labels}
        if n > 1:
            self.token_inputs[SEGMENT_IDS] = lambda labels: labels
        self.sequence_inputs = {NUM_LOSS_TOKENS: sequence_rows(n, 2, per_row=2)}
        if self.preference_loss.uses_ref_model:
            self.sequence_inputs[REF_LOGPS] = sequence_rows(n, 2, per_row=2)
        if self.name == "kto":
            self.sequence_inputs[KTO_LABELS] = sequence_rows(n, 1, per_row=2)

    def loss_stats(
        self,
        logits: Tensor,
        inputs: Mapping[str, Tensor],
        layout: ActivationLayout,
        groups: ParallelGroups,
    ) -> Tensor:
        """Sums the log-probabilities of each sequence's labels: float32 (pairs, 2)."""
        logps = label_logps(logits, inputs["labels"], layout, groups)
        n = self._sequences_per_sample
        return sum_by_sequence(logps, inputs.get(SEGMENT_IDS), n).reshape((-1, 2))

    def loss(self, stats: Tensor, inputs: Mapping[str, Tensor], groups: ParallelGroups) -> Tensor:
        num_tokens, one = inputs[NUM_LOSS_TOKENS], popxl.constant(1.0, popxl.float32)
        is_present = ops.greater(num_tokens, popxl.constant(0.0, popxl.float32))
        # Sequences that are not there get a probability other than 0 and 1: finite log-odds.
        placeholder = popxl.constant(np.full(num_tokens.shape, -1.0), popxl.float32, "unsure")
        logps = ops.where(is_present, stats, placeholder)
        mean_logps = logps / ops.maximum(num_tokens, one)
        averages_tokens = self.preference_loss.averages_tokens
        scores = mean_logps if averages_tokens else logps
        if self.preference_loss.uses_ref_model:
            ref_logps = inputs[REF_LOGPS]
            scores -= ref_logps / ops.maximum(num_tokens, one) if averages_tokens else ref_logps
        chosen, rejected = ops.split(scores, 2, 1)
        pair_is_present = ops.cast(ops.split(is_present, 2, 1)[0], popxl.float32)
        pair = PairLogps(chosen, rejected, inputs.get(KTO_LABELS), pair_is_present)
        losses = self.preference_loss.fn(pair, self._training, groups)
        if self.name == "cpo":
            losses -= ops.split(mean_logps, 2, 1)[0]
        return ops.sum(losses * pair_is_present)

    # ---- on the host ------------------------------------------------------------------------
    def normalizer(self, batch: Batch) -> int:
        return int(np.count_nonzero(batch[NUM_LOSS_TOKENS][:, 0]))

    def metric_sums(self, stats: np.ndarray, batch: Batch) -> MetricSums:
        """Returns sums and counts of rewards and log-probabilities, under TRL's names.

        Rewards are beta times the scores that the loss compares.

        Args:
            stats: float32, (pairs, 2) in any shape.
        """
        averages_tokens = self.preference_loss.averages_tokens
        is_present = batch[NUM_LOSS_TOKENS][:, 0] > 0
        num_tokens = batch[NUM_LOSS_TOKENS].astype(np.float64)[is_present]
        scores = stats.reshape(-1, 2).astype(np.float64)[is_present]
        scores = scores / num_tokens if averages_tokens else scores
        rewards = scores
        if self.preference_loss.uses_ref_model:
            ref_logps = batch[REF_LOGPS].astype(np.float64)[is_present]
            rewards = scores - (ref_logps / num_tokens if averages_tokens else ref_logps)
        kl, rewards = rewards[:, 1], rewards * self._training.resolved_beta
        if self.name == "kto":
            desirable = batch[KTO_LABELS][is_present, 0] > 0
            index: dict[str, Any] = {"chosen": (desirable, 0), "rejected": (~desirable, 0)}
            other_values = {"kl": kl}
        else:
            index = {"chosen": np.s_[:, 0], "rejected": np.s_[:, 1]}
            is_accurate = rewards[:, 0] > rewards[:, 1]
            other_values = {"rewards/accuracies": is_accurate.astype(np.float64)}
        values = {f"rewards/{name}": rewards[i] for name, i in index.items()}
        values |= {f"logps/{name}": scores[i] for name, i in index.items()}
        values |= other_values
        return {name: (float(np.sum(v)), float(len(v))) for name, v in values.items()}
