"""Distillation from a teacher's likeliest tokens, which a pass of the teacher stored before."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

import popxl
from config.metrics import MetricSums
from config.objectives import CROSS_ENTROPY_METRIC, KD_LOSS, OBJECTIVES
from data.samples import IGNORE_INDEX, Batch, count_loss_tokens
from data.token_outputs import TEACHER_IDS, TEACHER_LOGPS, TEACHER_REST
from modelling.objectives.cross_entropy import CrossEntropy
from modelling.objectives.sharded_logits import ShardedLogits
from modelling.objectives.token_outputs import TokenOutputs
from popxl import Tensor, TensorSpec, ops

if TYPE_CHECKING:
    from config.sections import RunConfig
    from modelling.layers.activation_layout import ActivationLayout
    from modelling.layers.parallel import ParallelGroups


class TopTokens(TokenOutputs):
    """The likeliest tokens of a teacher: ids, log-probabilities, and the rest's log-mass.

    Values of a token are the k ids, their log-probabilities, and log(sum(p^(1 / temperature)))
    over all other tokens, from which the rest's share at that temperature follows.

    Args:
        k: number of tokens.
        temperature: of the rest.
        vocab_size: of the student; the teacher's tokens beyond it, which no text has, are left out.
    """

    def __init__(self, k: int, temperature: float, vocab_size: int) -> None:
        super().__init__()
        self._k, self._temperature, self._vocab_size = k, temperature, vocab_size

    def token_values(
        self, logits: Tensor, labels: Tensor, layout: ActivationLayout, groups: ParallelGroups
    ) -> Tensor:
        local_size = logits.shape[-1]
        flat = logits.reshape((labels.nelms, local_size))
        sharded = ShardedLogits(flat, groups).mask_ids_from(self._vocab_size).subtract_max()
        logps = ShardedLogits(sharded.local - sharded.logsumexp(), groups)
        values, ids = logps.top_k(self._k)
        rest = logps.mask_ids(ids).scale_by_temperature(self._temperature).logsumexp()
        return ops.concat([ops.cast(ids, popxl.float32), values, rest], 1)


class Distillation(CrossEntropy):
    """Weighted mean of the labels' cross-entropy and the divergence from a teacher.

    loss = (1 - w) CE + w t^2 KL(q || p), per loss token, with w `training.distill_weight` and t
    `training.temperature` (Hinton et al., arXiv:1503.02531). q has the teacher's likeliest tokens
    at temperature t: renormalised, and p is over the whole vocabulary; or, with
    `training.distill_rest` bin, all other tokens are one outcome more of q and of p.

    With `training.beta` b the divergence is GKD's generalised JSD (Agarwal et al.,
    arXiv:2306.13649), as in TRL 1.16: b KL(q || m) + (1 - b) KL(p || m) with m = b q + (1 - b) p;
    KL(q || p) where b is 0, KL(p || q) where it is 1.

    Inputs besides `labels`, of each loss token: `teacher_ids`, int32 (batch, length, k);
    `teacher_logps`, float16 (batch, length, k); with a bin, `teacher_rest`, float32 (batch,
    length), see `TopTokens`.
    """

    metrics = OBJECTIVES["distill"].metrics
    returns_stats = True
    sums_token_losses = False

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        training = config.training
        self._weight, self._temperature = training.distill_weight, training.temperature
        self._beta = training.resolved_beta
        self._has_bin = training.distill_rest == "bin"
        k = training.top_k or 0
        self.token_inputs = {
            "labels": lambda labels: labels,
            TEACHER_IDS: _token_spec_maker(popxl.int32, k),
            TEACHER_LOGPS: _token_spec_maker(popxl.float16, k),
            **({TEACHER_REST: _token_spec_maker(popxl.float32)} if self._has_bin else {}),
        }

    def loss_stats(
        self,
        logits: Tensor,
        inputs: Mapping[str, Tensor],
        layout: ActivationLayout,
        groups: ParallelGroups,
    ) -> Tensor:
        """Sums cross-entropy and divergence over loss tokens: float32 (1, 2)."""
        tokens = inputs["labels"].nelms
        flat = {
            name: layout.transpose_if_sequence_first(t).reshape((tokens, -1))
            for name, t in inputs.items()
        }
        sharded = ShardedLogits(logits.reshape((tokens, logits.shape[-1])), groups).subtract_max()
        labels, ids = flat["labels"], flat[TEACHER_IDS]
        chosen = sharded.gather_ids(ops.concat([labels, ids], 1))
        of_label, top_logits = ops.split(chosen, [1, ids.shape[1]], 1)
        divergence = self._divergence(sharded, top_logits, flat)
        return self._sum_loss_tokens([sharded.logsumexp() - of_label, divergence], labels)

    def _sum_loss_tokens(self, losses: Sequence[Tensor], labels: Tensor) -> Tensor:
        """Sums values of loss tokens: several (tokens, 1) -> (1, n)."""
        ignored = ops.equal(labels, popxl.constant(IGNORE_INDEX, popxl.int32, "ignored"))
        zero = popxl.constant(0.0, popxl.float32)
        return ops.sum(ops.where(ignored, zero, ops.concat(losses, 1)), [0], keepdims=True)

    def _divergence(
        self, logits: ShardedLogits, top_logits: Tensor, inputs: Mapping[str, Tensor]
    ) -> Tensor:
        """Computes t^2 KL(q || p) of each token: float32 (tokens, 1).

        Args:
            top_logits: logits of the teacher's likeliest tokens, (tokens, k).
            inputs: the teacher's outputs, (tokens, ...).
        """
        t = self._temperature
        logits = logits.scale_by_temperature(t)
        log_p, log_q = [top_logits / t], [ops.cast(inputs[TEACHER_LOGPS], popxl.float32) / t]
        if self._has_bin:
            log_p.append(logits.mask_ids(inputs[TEACHER_IDS]).logsumexp())
            log_q.append(inputs[TEACHER_REST])
        student = ops.concat(log_p, 1) - logits.logsumexp()
        teacher = ops.concat(log_q, 1)
        teacher -= ops.logsumexp(teacher, 1, keepdims=True)
        return self._jsd(teacher, student) * (t * t)

    def _jsd(self, teacher: Tensor, student: Tensor) -> Tensor:
        """Computes the generalised JSD of log-probabilities, (tokens, outcomes) -> (tokens, 1)."""
        beta = self._beta
        if beta == 0:
            return _kl(teacher, student)
        if beta == 1:
            return _kl(student, teacher)
        parts = student + math.log1p(-beta), teacher + math.log(beta)
        largest = ops.detach(ops.maximum(*parts))
        total = ops.exp(parts[0] - largest) + ops.exp(parts[1] - largest)
        mixture = largest + ops.log(total)
        return _kl(teacher, mixture) * beta + _kl(student, mixture) * (1 - beta)

    def loss(self, stats: Tensor, inputs: Mapping[str, Tensor], groups: ParallelGroups) -> Tensor:
        weights = popxl.constant([[1 - self._weight, self._weight]], popxl.float32, "weights")
        return ops.sum(stats * weights)

    def metric_sums(self, stats: np.ndarray, batch: Batch) -> MetricSums:
        """Returns sums and counts of cross-entropy and divergence.

        Args:
            stats: float32 (micro-batches, 2).
        """
        count = float(count_loss_tokens(batch))
        sums = stats.reshape(-1, 2).sum(0, dtype=np.float64)
        return {
            CROSS_ENTROPY_METRIC: (float(sums[0]), count),
            KD_LOSS: (float(sums[1]), count),
        }


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """Computes KL(p || q) of log-probabilities: (tokens, outcomes) -> (tokens, 1)."""
    return ops.sum(ops.exp(p) * (p - q), 1, keepdims=True)


def _token_spec_maker(dtype: popxl.dtype, *sizes: int) -> Callable[[TensorSpec], TensorSpec]:
    """Returns a function that makes the spec of an input with values for each token."""
    return lambda labels: TensorSpec((*labels.shape, *sizes), dtype)
