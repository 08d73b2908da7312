"""Data loader: shuffled global batches, sharded over data-parallel replicas.

Our own loader, not Grain: the data are token ids in memory, so worker processes would have nothing
to read or decode. What remains of a loader is a permutation and a position, which take four numbers
in a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np

import popdist
from config.length_buckets import bucket_lengths
from config.sections import RunConfig
from data.samples import Batch, Samples, indices_of_epoch, sample_lengths, shuffle_epoch
from files.json_files import JsonObject


class Loader:
    """Infinite iterator of global batches of samples; each epoch has every sample once, shuffled.

    A batch that an epoch cannot fill continues in the next epoch, so that all batches are full and
    no sample is left out. Batches do not depend on how the devices share the work.

    With buckets of lengths, samples come in the same shuffled order and wait in their bucket; a
    bucket that has a batch gives it. What waits at the end of an epoch comes first in the next.
    """

    def __init__(
        self,
        samples: Samples,
        batch_size: int,
        seed: int,
        local_indices: np.ndarray | None = None,
        lengths: Sequence[int] = (),
    ) -> None:
        """Start at the beginning of the first epoch.

        Args:
            batch_size: samples in a global batch.
            local_indices: indices in the batch, int [n], of the samples wanted here; None: all.
            lengths: of the buckets, ascending; one or none: all samples are in one bucket.

        Raises:
            ValueError: there are no samples.
        """
        if len(samples) == 0:
            raise ValueError("there are no samples to train on: give a data set that has some")
        self._samples = samples
        self._batch_size = batch_size
        self._seed, self._own = seed, local_indices
        self._bucket_of_sample = np.zeros(len(samples), np.int64)
        if len(lengths) > 1:
            self._bucket_of_sample = np.searchsorted(lengths[:-1], sample_lengths(samples))
        self._waiting: list[list[int]] = [[] for _ in range(max(len(lengths), 1))]
        self._seek(epoch=0, position=0)

    @classmethod
    def from_config(cls, config: RunConfig, samples: Samples) -> Loader:
        """Create the loader of a run's training batches, for the replicas of this process."""
        size, seed = config.training.global_batch_size, config.data.seed
        seed = config.model.seed if seed is None else seed
        local = BatchSharding.from_config(config).local_sample_indices(size)
        return cls(samples, size, seed, local, bucket_lengths(config))

    def peek_indices(self, count: int) -> np.ndarray:
        """Indices of the next `count` samples, at most those left in the epoch."""
        return self._permutation[self._position : self._position + count]

    @property
    def samples_per_epoch(self) -> int:
        """Number of samples in an epoch of the data."""
        return len(self._samples)

    @property
    def num_samples_seen(self) -> int:
        """Number of samples returned since the start of the first epoch."""
        waiting = sum(map(len, self._waiting))
        return self._epoch * len(self._samples) + self._position - waiting

    def next_batch(self) -> dict[str, np.ndarray]:
        """Next global batch, restricted to this process's samples: arrays [n, ...]."""
        while (missing := self._batch_size - max(map(len, self._waiting))) > 0:
            # No bucket has a batch before the last of these.
            chunk = self._permutation[self._position : self._position + missing]
            self._add_to_buckets(chunk)
            self._position += len(chunk)
            if self._position == len(self._permutation):
                self._seek(self._epoch + 1, 0)
        bucket = max(self._waiting, key=len)
        batch = np.asarray(bucket[: self._batch_size], np.int64)
        del bucket[: self._batch_size]
        return self._samples.take(batch if self._own is None else batch[self._own])

    def _add_to_buckets(self, indices: np.ndarray) -> None:
        for index, bucket in zip(indices.tolist(), self._bucket_of_sample[indices], strict=True):
            self._waiting[bucket].append(index)

    @cached_property
    def _samples_digest(self) -> str:
        return self._samples.digest

    def state(self) -> dict[str, Any]:
        """Position in the data and a hash of the samples, as JSON values for a checkpoint."""
        return {
            "seed": self._seed,
            "epoch": self._epoch,
            "position": self._position,
            "samples": len(self._samples),
            "digest": self._samples_digest,
            **({"waiting": waiting} if (waiting := [*chain(*self._waiting)]) else {}),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of a checkpoint; the following batches are bit-identical.

        The batch size may be another one. The state's seed replaces the one given at construction.

        Raises:
            ValueError: the state belongs to another data set.
            FileError: it is no such state.
        """
        fields = JsonObject(dict(state), "the saved data position")
        seed, epoch, position, samples = map(
            fields.get_count, ("seed", "epoch", "position", "samples")
        )
        if samples != len(self._samples):
            raise ValueError(
                f"the run that is continued had {samples} samples, but there are "
                f"{len(self._samples)}: give the same data, or --checkpoint.load_optimizer false "
                "for a new run from its weights, with another --save"
            )
        if "digest" in state and fields.get_text("digest") != self._samples_digest:
            raise ValueError(
                "the run that is continued had other training data: give the same, or "
                "--checkpoint.load_optimizer false for a new run from its weights, with another "
                "--save"
            )
        if position >= samples:
            raise ValueError(f"the saved data position {position} is not among {samples} samples")
        waiting = np.asarray(fields.get_counts("waiting") if "waiting" in fields else [], np.int64)
        if (waiting >= samples).any():
            raise ValueError(f"the saved data position has samples beyond the {samples} there are")
        self._seed, self._waiting = seed, [[] for _ in self._waiting]
        self._add_to_buckets(waiting)
        self._seek(epoch, position)

    def _seek(self, epoch: int, position: int) -> None:
        self._epoch, self._position = epoch, position
        indices = indices_of_epoch(self._samples, self._seed, epoch)
        self._permutation = indices[shuffle_epoch(self._seed, epoch, len(indices))]


@dataclass(frozen=True)
class BatchSharding:
    """Assignment of the samples of a global batch to replicas and micro-batches.

    Replica r belongs to data-parallel copy r // tensor_parallel; the replicas of a copy get the
    same samples. Micro-batch a of copy d has the samples from
    (a * data_parallel + d) * micro_batch_size on: the batch is read in order, so every split of it
    computes the same samples.

    Attributes:
        data_parallel: number of data-parallel copies.
        tensor_parallel: replicas of a copy.
        micro_batches: micro-batches of each copy.
        local_replicas: replicas that this process feeds; default: all.
    """

    data_parallel: int
    tensor_parallel: int
    micro_batches: int
    local_replicas: slice = field(default_factory=lambda: slice(None))

    @classmethod
    def from_config(cls, config: RunConfig, micro_batches: int | None = None) -> BatchSharding:
        """Create the assignment of samples for a run's program and this process's replicas.

        Args:
            micro_batches: of each data-parallel copy; default: those of an optimizer step.
        """
        local_count = config.num_replicas // popdist.getNumInstances()
        first_replica = popdist.getInstanceIndex() * local_count
        e, steps = config.execution, micro_batches or config.gradient_accumulation
        return cls(
            e.data_parallel,
            e.tensor_parallel,
            steps,
            slice(first_replica, first_replica + local_count),
        )

    @property
    def _dp_ranks_of_replicas(self) -> np.ndarray:
        """Data-parallel rank of each local replica, int [n]."""
        return np.repeat(np.arange(self.data_parallel), self.tensor_parallel)[self.local_replicas]

    @property
    def _num_local_dp_ranks(self) -> int:
        return int(self._dp_ranks_of_replicas[-1] - self._dp_ranks_of_replicas[0]) + 1

    def local_sample_indices(self, count: int) -> np.ndarray:
        """Indices of this process's samples in a global batch, int64 [n], in order.

        Raises:
            ValueError: the batch cannot be cut evenly.
        """
        if count % (self.micro_batches * self.data_parallel):
            raise ValueError(
                f"a global batch of {count} samples cannot be cut into {self.micro_batches} "
                f"micro-batches for each of {self.data_parallel} data-parallel copies"
            )
        by_copy = np.arange(count).reshape(self.micro_batches, self.data_parallel, -1)
        first_copy = self._dp_ranks_of_replicas[0]
        return by_copy[:, first_copy : first_copy + self._num_local_dp_ranks].reshape(-1)

    def distribute_to_replicas(self, samples: np.ndarray) -> np.ndarray:
        """Distribute this process's samples over its replicas and micro-batches.

        Args:
            samples: [local samples, ...], at `local_sample_indices`; an array can have several
                rows for a sample.

        Returns:
            [micro_batches, own replicas, micro_batch, ...], as host streams take it.
        """
        return self._group_by_dp_rank(samples)[
            :, self._dp_ranks_of_replicas - self._dp_ranks_of_replicas[0]
        ]

    def gather_in_batch_order(self, outputs: np.ndarray) -> np.ndarray:
        """Reorder the outputs of all replicas to the order of the batch's samples.

        Args:
            outputs: [micro-batches, replicas, rows, ...].

        Returns:
            [rows of all micro-batches, ...].
        """
        shape = self.micro_batches, self.data_parallel, self.tensor_parallel
        first_of_copy = outputs.reshape(*shape, *outputs.shape[2:])[:, :, 0]
        return first_of_copy.reshape(-1, *first_of_copy.shape[3:])

    def select_local_rows(self, rows: np.ndarray) -> np.ndarray:
        """Select this process's rows from an array in the order of a global batch."""
        by_copy = rows.reshape(self.micro_batches, self.data_parallel, -1, *rows.shape[1:])
        first_copy = self._dp_ranks_of_replicas[0]
        return by_copy[:, first_copy : first_copy + self._num_local_dp_ranks].reshape(
            -1, *rows.shape[1:]
        )

    def drop_replicated_samples(self, batch: Batch) -> Batch:
        """Drop samples that a process of lower rank has, too, so that each counts once."""
        first_replica = self.local_replicas.start or 0
        if first_replica % self.tensor_parallel == 0:
            return batch
        later_copies = {name: self._group_by_dp_rank(array)[:, 1:] for name, array in batch.items()}
        return {name: array.reshape(-1, *array.shape[3:]) for name, array in later_copies.items()}

    def _group_by_dp_rank(self, samples: np.ndarray) -> np.ndarray:
        """Reshape samples to [micro_batches, local data-parallel ranks, micro_batch, ...]."""
        sizes = self.micro_batches, self._num_local_dp_ranks
        return samples.reshape(*sizes, len(samples) // (sizes[0] * sizes[1]), *samples.shape[1:])
