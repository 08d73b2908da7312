"""Log-probabilities of the frozen reference model in preference training, computed once and cached.

The reference model has the weights that the run started with, without adapters.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from data.preference_samples import NUM_LOSS_TOKENS, REF_LOGPS, SamplesWithRefLogps
from data.samples import Samples
from run.frozen_outputs import OutputKind, to_structured_rows
from run.initial_model import InitialModel

PAIR_LOGPS = np.dtype([(REF_LOGPS, "<f4", (2,))])
"""Row of a cache file: the log-probabilities of a pair's answers."""


@dataclass(frozen=True)
class ReferenceLogps:
    """Log-probabilities of preference pairs by the model that a run starts from."""

    reference: InitialModel
    teacher_head = None
    """Its outputs are stored: the trained program holds no head of it (`Teacher.teacher_head`)."""

    @property
    def initial_models(self) -> tuple[InitialModel, ...]:
        """The frozen models that are used."""
        return (self.reference,)

    def remove_drafts(self) -> None:
        """Delete unfinished cache files that no process is writing."""
        for initial_model in self.initial_models:
            initial_model.remove_drafts()

    def extend_samples(self, samples: Samples) -> SamplesWithRefLogps:
        """Add the reference model's log-probabilities, cached or computed, to samples; collective.

        Raises:
            UserError: the cache has no file, and the weights are no longer available.
        """
        pairs = len(samples.take(np.zeros(1, np.int64))[NUM_LOSS_TOKENS])
        unknown = SamplesWithRefLogps(samples, np.zeros((len(samples), pairs, 2), np.float32))
        kind = OutputKind(
            "logps",
            PAIR_LOGPS,
            rows_per_sample=lambda samples: np.full(len(samples), pairs),
            to_rows=lambda stats, _: to_structured_rows(stats, PAIR_LOGPS),
        )
        with self.reference.model.outputs(unknown, kind) as file:
            logps = file.rows(range(len(samples)))[REF_LOGPS]
        return replace(unknown, ref_logps=logps.reshape(unknown.ref_logps.shape))
