"""Samples of fixed length: interface, order in an epoch, token counts and padded prompts."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from data.truncation import TruncationCounts

Batch = Mapping[str, np.ndarray]
"""Arrays [samples, ...] of a batch, by Hugging Face's names."""

IGNORE_INDEX = -100
"""Label of positions outside the loss, as in Hugging Face."""


OBJECTIVE_INPUTS = (
    "labels",
    "decoder_input_ids",
    "num_loss_tokens",
    "kto_labels",
    "ref_logps",
    "pooled_ids",
    "sequence_labels",
    "is_labeled",
    "teacher_ids",
    "teacher_logps",
    "teacher_rest",
    "teacher_states",
    "advantages",
    "old_per_token_logps",
    "ref_per_token_logps",
)
"""Arrays of a batch that objectives read."""


def select_objective_inputs(batch: Batch) -> dict[str, np.ndarray]:
    """Arrays of a batch, by name, that objectives read."""
    return {name: batch[name] for name in OBJECTIVE_INPUTS if name in batch}


class Samples(Protocol):
    """Interface of a data set whose samples have a fixed length."""

    @property
    def truncation_counts(self) -> TruncationCounts: ...

    @property
    def digest(self) -> str:
        """SHA-256 hash of all samples; equal hashes mean the same tokens in the same order."""
        ...

    def __len__(self) -> int: ...

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Batch of the samples at `indices`, in their order: arrays by name."""
        ...


@runtime_checkable
class EpochSampler(Protocol):
    """Interface of samples that determine which of them an epoch has, such as a mixture."""

    def epoch_indices(self, seed: int, epoch: int) -> np.ndarray:
        """Indices of the samples of an epoch, int64 [n], before shuffling."""
        ...


def indices_of_epoch(samples: Samples, seed: int, epoch: int) -> np.ndarray:
    """Indices of the samples of an epoch, int64 [n], before shuffling; by default all samples."""
    if isinstance(samples, EpochSampler):
        return samples.epoch_indices(seed, epoch)
    return np.arange(len(samples))


@runtime_checkable
class SamplesWithLengths(Protocol):
    """Interface of samples with known lengths before padding: those of encoder-decoders."""

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each sample's prompts, int64 [n]."""
        ...


def sample_lengths(samples: Samples) -> np.ndarray:
    """Number of tokens of each sample without padding, int64 [n].

    Raises:
        TypeError: the samples do not know them.
    """
    if not isinstance(samples, SamplesWithLengths):
        raise TypeError(f"{type(samples).__name__} has no lengths")
    return samples.lengths


@dataclass(frozen=True)
class ExtendedSamples(ABC):
    """Base class of samples whose batches have further arrays, such as a frozen model's outputs.

    Attributes:
        samples: those without the arrays.
    """

    samples: Samples

    @property
    def truncation_counts(self) -> TruncationCounts:
        """Counts of examples that were truncated or dropped."""
        return self.samples.truncation_counts

    @property
    def digest(self) -> str:
        """SHA-256 hash of the samples, by default without the further arrays."""
        return self.samples.digest

    def hash_with(self, *values: np.ndarray | int | None) -> str:
        """SHA-256 hash of the samples and of further arrays."""
        return hash_arrays(np.frombuffer(bytes.fromhex(self.samples.digest), np.uint8), *values)

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each sample, int64 [n]."""
        return sample_lengths(self.samples)

    def epoch_indices(self, seed: int, epoch: int) -> np.ndarray:
        """Indices of the samples of an epoch, int64 [n], before shuffling."""
        return indices_of_epoch(self.samples, seed, epoch)

    @abstractmethod
    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Batch of the samples at `indices`, in their order: arrays by name."""


def longest_sample(batch: Batch) -> int:
    """Number of tokens of a batch's longest sample without padding, at least 1."""
    (used,) = np.nonzero(get_segment_ids(batch).any(axis=0))
    return int(used[-1]) + 1 if len(used) else 1


def hash_arrays(*values: np.ndarray | int | None) -> str:
    """SHA-256 hash of arrays and numbers."""
    sha256 = hashlib.sha256()
    for value in values:
        array = np.ascontiguousarray(-1 if value is None else value)
        sha256.update(f"{array.dtype.str}{array.shape}".encode())
        sha256.update(array.data)
    return sha256.hexdigest()


def count_loss_tokens(batch: Batch) -> int:
    """Count the loss tokens of a batch, the denominator of its mean loss."""
    return int(np.count_nonzero(batch["labels"] != IGNORE_INDEX))


def get_segment_ids(batch: Batch) -> np.ndarray:
    """Segment ids of a batch's tokens, 0 for padding.

    Without segment ids, the attention mask; without both, ones.
    """
    for name in ("segment_ids", "attention_mask"):
        if name in batch:
            return batch[name]
    return np.ones_like(batch["input_ids"])


@dataclass(frozen=True)
class Prompts:
    """Token ids of prompts, padded on the right, with their attention mask.

    Attributes:
        texts: the prompts before truncation.
        input_ids: int32 [n, length].
        mask: int32 [n, length], 1 = token.
        num_truncated: number of prompts that were longer and lost a part.
        forced_tokens: first token of each answer, int32 [n]; None: the model's configuration says.
    """

    texts: Sequence[str]
    input_ids: np.ndarray
    mask: np.ndarray
    num_truncated: int
    forced_tokens: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.input_ids)


def shuffle_epoch(seed: int, epoch: int, count: int) -> np.ndarray:
    """Order of an epoch's `count` samples, int64 [count]; the same for the same arguments.

    It sorts raw output of the Philox generator instead of calling `permutation`: numpy guarantees
    that the former stays the same in later versions, but not the latter.
    """
    keys = np.random.Philox(np.random.SeedSequence([seed, epoch])).random_raw(count)
    return np.argsort(keys, kind="stable")
