"""Log-probabilities of rollouts by the policy that wrote them and by a reference model.

The policy is the model that a run starts from, with its adapters, unless the rows have its
log-probabilities; the reference model is the same without adapters.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from data.rollout_samples import OLD_LOGPS, REF_LOGPS, RolloutSamples
from data.samples import Samples
from data.token_outputs import FrozenTokenOutputs, SamplesWithTokenOutputs
from run.frozen_outputs import token_logps_kind
from run.initial_model import InitialModel


@dataclass(frozen=True)
class RolloutLogps:
    """Log-probabilities of rollouts' tokens by the model that a run starts from.

    Attributes:
        policy: the model that wrote the rollouts.
        reference: the model from which the KL divergence is; None: it is not used.
        temperature: at which the rollouts were sampled.
    """

    policy: InitialModel
    reference: InitialModel | None
    temperature: float
    teacher_head = None
    """Its outputs are stored: the trained program holds no head of it (`Teacher.teacher_head`)."""

    @property
    def initial_models(self) -> tuple[InitialModel, ...]:
        """The frozen models that are used."""
        return (self.policy, *([] if self.reference is None else [self.reference]))

    def remove_drafts(self) -> None:
        """Delete unfinished cache files that no process is writing."""
        for initial_model in self.initial_models:
            initial_model.remove_drafts()

    def extend_samples(self, samples: Samples) -> SamplesWithTokenOutputs:
        """Add the log-probabilities, known, cached or computed, to samples; collective.

        Raises:
            UserError: they are in no file, and the weights are no longer available.
        """
        assert isinstance(samples, RolloutSamples)
        old = samples.old_logps or self._logps(self.policy, samples, OLD_LOGPS)
        if self.reference is None:
            return SamplesWithTokenOutputs(samples, old)
        ref = self._logps(self.reference, samples, REF_LOGPS)
        if samples.training.objective == "rloo":
            order = np.arange(len(samples))
            samples = samples.with_kl_penalty(
                old.rows(order)[OLD_LOGPS] - ref.rows(order)[REF_LOGPS]
            )
        return SamplesWithTokenOutputs(SamplesWithTokenOutputs(samples, old), ref)

    def _logps(self, model: InitialModel, samples: RolloutSamples, name: str) -> FrozenTokenOutputs:
        kind = token_logps_kind(name, self.temperature)
        return model.model.outputs(samples.samples, kind)
