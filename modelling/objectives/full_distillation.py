"""Distillation from a teacher's logits of the whole vocabulary, by a head held in the program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import popxl
from data.token_outputs import TEACHER_STATES
from modelling.objectives.distillation import Distillation
from modelling.objectives.sharded_logits import ShardedLogits
from popxl import Tensor, TensorSpec

if TYPE_CHECKING:
    from config.sections import RunConfig
    from modelling.layers.activation_layout import ActivationLayout
    from modelling.layers.parallel import ParallelGroups

TEACHER_LOGITS = "teacher_logits"
"""The teacher's logits, which the student's output layer makes of `teacher_states`."""


@dataclass(frozen=True)
class TeacherStates:
    """A teacher's last hidden states.

    Attributes:
        hidden_size, dtype: of a state.
        vocab_size: number of the teacher's tokens.
    """

    hidden_size: int
    dtype: popxl.dtype
    vocab_size: int

    def spec(self, labels: TensorSpec) -> TensorSpec:
        """Returns the spec of the states of labels, (batch, length)."""
        return TensorSpec((*labels.shape, self.hidden_size), self.dtype)


class FullDistillation(Distillation):
    """Weighted mean of the labels' cross-entropy and the divergence over the whole vocabulary.

    The formulas are those of `Distillation`, with all tokens in place of the likeliest. Tokens that
    only one of the models has are left out of both distributions.

    Inputs: `labels`; `teacher_states` (batch, length, hidden size of the teacher), for which
    `loss_stats` gets `teacher_logits`, of the shape of the student's.

    Attributes:
        states: the teacher's; set before the inputs' specs are asked for.
    """

    states: TeacherStates | None = None

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.token_inputs = {"labels": lambda labels: labels, TEACHER_STATES: self._states_spec}

    def _states_spec(self, labels: TensorSpec) -> TensorSpec:
        assert self.states is not None, "the program holds the teacher's head"
        return self.states.spec(labels)

    def loss_stats(
        self,
        logits: Tensor,
        inputs: Mapping[str, Tensor],
        layout: ActivationLayout,
        groups: ParallelGroups,
    ) -> Tensor:
        """Sums cross-entropy and divergence over loss tokens: float32 (1, 2).

        Args:
            inputs: `labels`, and `teacher_logits` in the layout of the logits.
        """
        labels = layout.transpose_if_sequence_first(inputs["labels"])
        labels, shape = labels.reshape((labels.nelms, 1)), (labels.nelms, logits.shape[-1])
        student = ShardedLogits(logits.reshape(shape), groups).subtract_max()
        teacher = ShardedLogits(inputs[TEACHER_LOGITS].reshape(shape), groups)
        losses = [student.logsumexp() - student.gather_ids(labels)]
        losses.append(self._token_divergence(student, teacher))
        return self._sum_loss_tokens(losses, labels)

    def _token_divergence(self, student: ShardedLogits, teacher: ShardedLogits) -> Tensor:
        """Computes t^2 times the divergence of each token: float32 (tokens, 1)."""
        assert self.states is not None
        t, known = self._temperature, min(self.states.vocab_size, self._vocab_size)
        log_q, log_p = (
            logits.mask_ids_from(known).subtract_max().scale_by_temperature(t).log_softmax()
            for logits in (teacher, student)
        )
        local = self._jsd(log_q.local, log_p.local)
        return student.groups.reduce_from_tp(local) * (t * t)
