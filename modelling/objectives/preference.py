"""What is learned of two texts at a time: the one that people prefer, and the other.

Formulas by log-probabilities of whole answers: c of the chosen one and r of the rejected one, less
those of a reference where there is one, or means of their tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

import popxl
from config.metrics import OBJECTIVES, Tally
from data.preference_samples import (
    KTO_LABELS,
    NUM_LOSS_TOKENS,
    REF_LOGPS,
    SEGMENT_IDS,
    sequences_per_sample,
)
from data.samples import IGNORE_INDEX, Batch
from modelling.objectives.cross_entropy import token_losses
from modelling.objectives.objective import Objective
from popxl import Tensor, TensorSpec, ops

if TYPE_CHECKING:
    from config.run import Training
    from config.sections import RunConfig
    from modelling.layers.axes import ActivationLayout
    from modelling.layers.parallel import ParallelGroups


@dataclass(frozen=True)
class PairLogps:
    """Two texts of each unit of a micro-batch; float32 (units, 1) all.

    Attributes:
        chosen, rejected: log-probabilities, or means, less the reference's if there is one.
        sign: of KTO: 1 where the text is desirable, -1 where not.
        present: 1, or 0 where a sample has no more units.
    """

    chosen: Tensor
    rejected: Tensor
    kto_labels: Tensor | None
    present: Tensor

    @property
    def difference(self) -> Tensor:
        """What the chosen one has more."""
        return self.chosen - self.rejected


LossOf = Callable[[PairLogps, "Training", "ParallelGroups"], Tensor]
"""The loss of each unit."""


@dataclass(frozen=True)
class PreferenceLoss:
    """One of the objectives of preferences.

    Attributes:
        loss: see there.
        referred: whether the log-probabilities of a reference are taken off.
        means: whether those of a text are the mean of its tokens.
    """

    loss: LossOf
    uses_reference: bool = True
    means: bool = False


def log_sigmoid(x: Tensor) -> Tensor:
    """log(sigmoid(x)) of (n, 1), by one formula for all x: the gradient at 0, where training
    begins, is 1/2."""
    zero = popxl.constant(np.zeros(x.shape), x.dtype, "zero")
    return -ops.logsumexp(ops.concat([zero, -x], 1), 1, keepdims=True)


def _log_odds(mean: Tensor) -> Tensor:
    """log(p / (1 - p)) of log p < 0; 1 - p is exact where p is nearly 1."""
    t = ops.tanh(mean * 0.5)
    return mean - ops.log(t * -2.0 / (1.0 - t))


def _dpo(pair: PairLogps, t: Training, groups: ParallelGroups) -> Tensor:
    return _smoothed(pair.difference * t.beta, t.label_smoothing)


def _smoothed(logits: Tensor, smoothing: float) -> Tensor:
    loss = log_sigmoid(logits) * (smoothing - 1.0)
    return loss - log_sigmoid(-logits) * smoothing if smoothing else loss


def _ipo(pair: PairLogps, t: Training, groups: ParallelGroups) -> Tensor:
    off = pair.difference - 1.0 / (2.0 * t.beta)
    return off * off


def _hinge(pair: PairLogps, t: Training, groups: ParallelGroups) -> Tensor:
    return ops.relu(1.0 - pair.difference * t.beta)


def _simpo(pair: PairLogps, t: Training, groups: ParallelGroups) -> Tensor:
    return _smoothed(pair.difference * t.beta - t.gamma, t.label_smoothing)


def _orpo(pair: PairLogps, t: Training, groups: ParallelGroups) -> Tensor:
    odds = _log_odds(pair.chosen) - _log_odds(pair.rejected)
    return -pair.chosen - log_sigmoid(odds) * t.beta


def _kto(pair: PairLogps, t: Training, groups: ParallelGroups) -> Tensor:
    """The second text is another's answer to the same prompt: it estimates the divergence of the
    policy from the reference, over all samples that are computed at a time."""
    assert pair.kto_labels is not None
    sums = ops.concat([ops.sum(pair.rejected * pair.present, [0], True),
                       ops.sum(pair.present, [0], True)], 1)  # fmt: skip
    sums = ops.detach(sums)
    if groups.data_parallel > 1:
        sums = ops.collectives.replicated_all_reduce(sums, "add", groups.dp)
    total, count = ops.split(sums, 2, 1)
    divergence = ops.relu(total / ops.maximum(count, popxl.constant(1.0, popxl.float32)))
    return 1.0 - ops.exp(log_sigmoid(pair.kto_labels * (pair.chosen - divergence) * t.beta))


PREFERENCE_LOSSES: Mapping[str, PreferenceLoss] = {
    "dpo": PreferenceLoss(_dpo),
    "ipo": PreferenceLoss(_ipo, means=True),
    "hinge": PreferenceLoss(_hinge),
    "simpo": PreferenceLoss(_simpo, uses_reference=False, means=True),
    "orpo": PreferenceLoss(_orpo, uses_reference=False, means=True),
    "cpo": PreferenceLoss(_dpo, uses_reference=False),
    "kto": PreferenceLoss(_kto),
}


class Preference(Objective):
    """What pairs of texts say, see `data.preference_samples`. The loss is the mean over pairs.

    CPO adds the mean negative log-likelihood of the chosen texts' tokens; ORPO's has it.
    """

    returns_stats = True

    def __init__(self, config: RunConfig) -> None:
        self._training = config.training
        self.name = config.training.objective
        self.kind = PREFERENCE_LOSSES[self.name]
        self.metrics = OBJECTIVES[self.name]
        self._texts = texts = sequences_per_sample(config)

        def of_units(width: int) -> Callable[[TensorSpec], TensorSpec]:
            return lambda tokens: TensorSpec((tokens.shape[0] * texts // 2, width), popxl.float32)

        self.token_inputs = {"labels": lambda tokens: tokens}
        if texts > 1:
            self.token_inputs[SEGMENT_IDS] = lambda tokens: tokens
        self.sequence_inputs = {NUM_LOSS_TOKENS: of_units(2)}
        if self.kind.uses_reference:
            self.sequence_inputs[REF_LOGPS] = of_units(2)
        if self.name == "kto":
            self.sequence_inputs[KTO_LABELS] = of_units(1)

    def loss_stats(
        self,
        logits: Tensor,
        inputs: Mapping[str, Tensor],
        layout: ActivationLayout,
        groups: ParallelGroups,
    ) -> Tensor:
        """The log-probability of each text's tokens that have a label: (units, 2)."""
        labels = inputs["labels"]
        batch, length = labels.shape
        losses = token_losses(logits, labels, layout, groups, "none")
        shape = (length, batch) if layout.transposed else (batch, length)
        logps = -layout.convert(losses.reshape(shape))
        if self._texts == 1:
            return ops.sum(logps, 1).reshape((batch // 2, 2))
        numbers = np.arange(1, self._texts + 1, dtype=np.int32).reshape(1, 1, -1)
        own = ops.equal(inputs[SEGMENT_IDS].reshape((batch, length, 1)),
                        popxl.constant(numbers, popxl.int32, "texts"))  # fmt: skip
        each = logps.reshape((batch, length, 1)) * ops.cast(own, popxl.float32)
        return ops.sum(each, 1).reshape((batch * self._texts // 2, 2))

    def loss(self, sums: Tensor, inputs: Mapping[str, Tensor], groups: ParallelGroups) -> Tensor:
        num_loss_tokens, one = inputs[NUM_LOSS_TOKENS], popxl.constant(1.0, popxl.float32)
        there = ops.greater(num_loss_tokens, popxl.constant(0.0, popxl.float32))
        # In place of a text that is not there, a probability that is neither 0 nor 1.
        unsure = popxl.constant(np.full(num_loss_tokens.shape, -1.0), popxl.float32, "unsure")
        known = ops.where(there, sums, unsure)
        means = known / ops.maximum(num_loss_tokens, one)
        scores = means if self.kind.means else known
        if self.kind.uses_reference:
            reference = inputs[REF_LOGPS]
            scores -= (
                reference / ops.maximum(num_loss_tokens, one) if self.kind.means else reference
            )
        chosen, rejected = ops.split(scores, 2, 1)
        present = ops.cast(ops.split(there, 2, 1)[0], popxl.float32)
        pair = PairLogps(chosen, rejected, inputs.get(KTO_LABELS), present)
        losses = self.kind.loss(pair, self._training, groups)
        if self.name == "cpo":
            losses -= ops.split(means, 2, 1)[0]
        return ops.sum(losses * present)

    # ---- on the host ------------------------------------------------------------------------
    def normalizer(self, batch: Batch) -> int:
        return int(np.count_nonzero(batch[NUM_LOSS_TOKENS][:, 0]))

    def keep_real_samples(self, batch: Batch, counted: np.ndarray) -> Batch:
        changed = dict(batch)
        for name, nothing in (("labels", IGNORE_INDEX), (NUM_LOSS_TOKENS, 0)):
            array = batch[name].copy()
            array[~np.repeat(counted, len(array) // len(counted))] = nothing
            changed[name] = array
        return changed

    def tally(self, sums: np.ndarray, batch: Batch) -> Tally:
        """Rewards are beta times the scores, which the loss compares."""
        num_loss_tokens = batch[NUM_LOSS_TOKENS].astype(np.float64)
        there = num_loss_tokens[:, 0] > 0
        num_loss_tokens, scores = (
            num_loss_tokens[there],
            sums.reshape(-1, 2).astype(np.float64)[there],
        )
        scores = scores / num_loss_tokens if self.kind.means else scores
        rewards = scores
        if self.kind.uses_reference:
            reference = batch[REF_LOGPS].astype(np.float64)[there]
            rewards = scores - (reference / num_loss_tokens if self.kind.means else reference)
        kl, rewards = rewards[:, 1], rewards * self._training.beta
        if self.name == "kto":
            desirable = batch[KTO_LABELS][there, 0] > 0
            of_kind = {"chosen": desirable, "rejected": ~desirable}
            scored = {name: (rewards[own, 0], scores[own, 0]) for name, own in of_kind.items()}
            more = {"kl": kl}
        else:
            names = ("chosen", "rejected")
            scored = {n: (rewards[:, i], scores[:, i]) for i, n in enumerate(names)}
            better = rewards[:, 0] > rewards[:, 1]
            more = {"rewards/accuracies": better.astype(np.float64)}
        found = {f"rewards/{name}": reward for name, (reward, _) in scored.items()}
        found |= {f"logps/{name}": logps for name, (_, logps) in scored.items()}
        return {n: (float(np.sum(v)), float(len(v))) for n, v in (found | more).items()}
