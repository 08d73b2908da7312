"""The session that computes the loss of a configured model, without training it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

import popdist
from config.sections import RunConfig
from data.batches import BatchSharding
from data.samples import Batch, Samples
from modelling.objectives import WEIGHT, objective_of
from modelling.phases.evaluation import build_loss
from modelling.spec import ModelFamily
from sessions.running import RunningModel


@dataclass(frozen=True)
class Loss:
    """The loss of samples.

    Attributes:
        total: over all of them.
        tokens: what that is divided by: of target tokens their number, end tokens included.
    """

    total: float
    tokens: int

    @property
    def mean(self) -> float:
        """The loss as objectives mean it."""
        return self.total / max(self.tokens, 1)


class Losses(RunningModel):
    """Computes losses. Use it as a context; weights must be written before."""

    def __init__(
        self, config: RunConfig, family: ModelFamily, lender: RunningModel | None = None
    ) -> None:
        """Build and compile the program. A configuration for training serves as well.

        Args:
            lender: see `RunningModel`.
        """
        e = config.execution
        at_once = e.micro_batch_size * e.data_parallel
        batch = at_once * max(config.training.global_batch_size // at_once, 1)
        config = replace(
            config,
            model=replace(config.model, eval=True),
            training=replace(config.training, global_batch_size=batch),
        )
        self._sharding = BatchSharding.of(config)
        self._family, self.objective = family, objective_of(config)
        self.program = build_loss(config, family.layout, family.weights(config))
        variables = self.program.variables
        super().__init__(config, self.program.ir, family.weights(config), variables, lender)

    def of(self, samples: Samples, on_progress: Callable[[int], object] | None = None) -> Loss:
        """The loss of all samples.

        Args:
            on_progress: called after each run of the program with the number of samples it did.
        """
        size = self.config.training.global_batch_size
        own = self._sharding.positions(size)
        total, tokens = 0.0, 0
        for start in range(0, len(samples), size):
            indices = np.arange(start, min(start + size, len(samples)))
            taken = samples.take(np.resize(indices, size)[own])
            batch = self.objective.only(taken, own < len(indices))
            total += self._sum(batch)
            tokens += self.objective.normaliser(self._sharding.without_duplicates(batch))
            if on_progress is not None:
                on_progress(len(indices))
        return Loss(total, sum(popdist.gather(tokens)))

    def _sum(self, batch: Batch) -> float:
        c = self.config
        arrays = self._family.sample_format.streams(batch)
        own, streams = self._sharding.own, self.program.inputs
        dealt = {streams[name]: x for name, x in arrays.items() if name in streams}
        inputs = {stream: self._sharding.to_replicas(x) for stream, x in dealt.items()}

        inputs[streams[WEIGHT]] = np.ones(
            (c.gradient_accumulation, own.stop - own.start), np.float32
        )
        losses = self._run(inputs)[self.program.loss]
        by_replica = losses.reshape(-1, c.execution.data_parallel, c.execution.tensor_parallel)
        return float(by_replica[..., 0].astype(np.float64).sum())
