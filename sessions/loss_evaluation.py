"""The session that computes the loss of a configured model without training it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import reduce

import numpy as np

import popdist
from config.metrics import MetricSums, add_metric_sums
from config.sections import RunConfig
from data.loader import BatchSharding
from data.samples import Batch, Samples, sample_lengths
from modelling.model_family import get_family
from modelling.objectives import LOSS_WEIGHT, Objective, make_objective
from modelling.phases.evaluation import (
    LossProgram,
    build_loss_program,
    evaluated_weight_map,
    loss_config,
)
from modelling.phases.teacher_head import TeacherHead
from sessions.aux_metrics import compute_metric_sums
from sessions.length_programs import LengthPrograms
from sessions.session import ModelSession


@dataclass(frozen=True)
class LossResult:
    """Sums of loss and metrics over samples, and the token count that divides them.

    Attributes:
        total: sum over all samples.
        tokens: the divisor of the mean: the number of target tokens, end tokens included.
        aux_metrics: sums of the objective's other metrics.
    """

    total: float
    tokens: int
    aux_metrics: MetricSums = field(default_factory=dict)

    @property
    def mean(self) -> float:
        """Mean loss per target token."""
        return self.total / max(self.tokens, 1)

    @property
    def metric_sums(self) -> MetricSums:
        """Sums of the loss and other metrics, by name."""
        return {**self.aux_metrics, "loss": (self.total, self.tokens)}


class LossSession(ModelSession):
    """A session that computes losses: a context manager; write the weights first."""

    def __init__(
        self,
        config: RunConfig,
        weight_source: ModelSession | None = None,
        objective: Objective | None = None,
        teacher_head: TeacherHead | None = None,
    ) -> None:
        """Build and compile the loss program; configurations for training work, too.

        Args:
            weight_source: see `ModelSession`.
            objective: what the head computes; None: the objective of the configuration.
            teacher_head: whose head the program holds, if the objective compares with it.
        """
        config = loss_config(config)
        self._sharding = BatchSharding.from_config(config)
        self._family, self.objective = get_family(config), objective or make_objective(config)
        weight_map = evaluated_weight_map(self._family.weight_map(config), objective)
        family = self._family

        def build(config: RunConfig) -> LossProgram:
            return build_loss_program(
                config, family.build_phases, weight_map, objective, teacher_head
            )

        self.program = build(config)
        variables = self.program.variables
        super().__init__(
            config, self.program.ir, weight_map, variables, weight_source, teacher_head
        )
        self._programs = LengthPrograms(config, self.session, self.program, build)

    def compute(
        self, samples: Samples, on_progress: Callable[[int], object] | None = None
    ) -> LossResult:
        """Compute the loss over all samples.

        Args:
            on_progress: called after each run of the program with its number of samples.
        """
        aux_metrics: MetricSums = {}
        total, tokens = 0.0, 0
        order = np.arange(len(samples))
        if len(self._programs) > 1:  # with the least padding
            order = np.argsort(sample_lengths(samples), kind="stable")
        for indices, batch in self._batches(samples, order):
            loss, sums = self._run_batch(batch)
            total += loss
            tokens += self.objective.normalizer(self._sharding.drop_replicated_samples(batch))
            if sums is not None:
                local = compute_metric_sums(self.objective, self._sharding, sums, batch)
                aux_metrics = add_metric_sums(aux_metrics, local)
            if on_progress is not None:
                on_progress(len(indices))
        return LossResult(
            total,
            sum(popdist.all_gather_object(tokens)),
            reduce(add_metric_sums, popdist.all_gather_object(aux_metrics)),
        )

    def loss_stats(
        self, samples: Samples, first_sample: int = 0
    ) -> Iterator[tuple[slice, np.ndarray]]:
        """Compute the loss statistics of all samples, one batch per program run.

        Args:
            first_sample: index of the first sample.

        Yields:
            A slice of the samples, and their statistics, float32 (n, sequences or pairs, ...), see
            `Objective.loss_stats`.
        """
        for indices, batch in self._batches(samples, np.arange(first_sample, len(samples))):
            sums = self._run_batch(batch)[1]
            assert sums is not None, "the objective has no loss statistics"
            by_sample = sums.reshape(self.config.training.global_batch_size, -1, *sums.shape[1:])
            yield slice(indices[0], indices[-1] + 1), by_sample[: len(indices)]

    def _batches(self, samples: Samples, order: np.ndarray) -> Iterator[tuple[np.ndarray, Batch]]:
        """Yield per batch the indices of its samples, in `order`, and this process's samples."""
        size = self.config.training.global_batch_size
        local = self._sharding.local_sample_indices(size)
        for start in range(0, len(order), size):
            indices = order[start : start + size]
            batch = samples.take(np.resize(indices, size)[local])
            yield indices, self.objective.keep_real_samples(batch, local < len(indices))

    def _run_batch(self, batch: Batch) -> tuple[float, np.ndarray | None]:
        """Run the program on a batch; returns its loss and all processes' loss statistics."""
        c, chosen = self.config, self._programs.for_batches([batch])
        program = chosen.program
        arrays = chosen.crop(self._family.sample_format.to_program_inputs(batch))
        local, streams = self._sharding.local_replicas, program.inputs
        inputs = {
            streams[name]: self._sharding.distribute_to_replicas(x) for name, x in arrays.items()
        }
        inputs[streams[LOSS_WEIGHT]] = np.ones(
            (c.gradient_accumulation, local.stop - local.start), np.float32
        )
        outputs = self._run(inputs, chosen.run)
        losses = self._sharding.gather_in_batch_order(outputs[program.loss][..., None])
        sums = program.sums
        loss_stats = None if sums is None else self._sharding.gather_in_batch_order(outputs[sums])
        return float(losses.astype(np.float64).sum()), loss_stats
