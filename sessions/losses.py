"""The session that computes the loss of a configured model, without training it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

import popdist
from config.sections import RunConfig
from data.batches import BatchSharding
from data.samples import IGNORE_INDEX, Batch, Samples, labelled_tokens
from modelling.phases.evaluation import build_loss
from modelling.spec import ModelFamily
from sessions.running import RunningModel


@dataclass(frozen=True)
class Loss:
    """The negative log-likelihood of target tokens, in nats.

    Attributes:
        total: over all of them.
        tokens: how many there are, end tokens included.
    """

    total: float
    tokens: int

    @property
    def mean(self) -> float:
        """Of a token."""
        return self.total / max(self.tokens, 1)

    @property
    def perplexity(self) -> float:
        """exp of the mean; infinite where that overflows."""
        with np.errstate(over="ignore"):
            return float(np.exp(self.mean))


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
        self._family = family
        self.program = build_loss(config, family.layout)
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
            batch = _with_labels_where(taken, own < len(indices))
            total += self._sum(batch)
            tokens += labelled_tokens(self._sharding.without_duplicates(batch))
            if on_progress is not None:
                on_progress(len(indices))
        return Loss(total, sum(popdist.gather(tokens)))

    def _sum(self, batch: Batch) -> float:
        c = self.config
        arrays = self._family.sample_format.streams(batch)
        own, streams = self._sharding.own, self.program.inputs
        dealt = {streams[name]: x for name, x in arrays.items() if name in streams}
        inputs = {stream: self._sharding.to_replicas(x) for stream, x in dealt.items()}

        inputs[streams["weight"]] = np.ones(
            (c.gradient_accumulation, own.stop - own.start), np.float32
        )
        losses = self._run(inputs)[self.program.loss]
        by_replica = losses.reshape(-1, c.execution.data_parallel, c.execution.tensor_parallel)
        return float(by_replica[..., 0].astype(np.float64).sum())


def _with_labels_where(batch: Batch, counts: np.ndarray) -> Batch:
    """The batch with nothing to predict in the samples that only fill it up.

    Args:
        counts: bool, whether a sample does not.
    """
    labels = batch["labels"].copy()
    rows = len(labels) // len(counts)  # targets of a sample
    labels[~np.repeat(counts, rows)] = IGNORE_INDEX
    return {**batch, "labels": labels}
