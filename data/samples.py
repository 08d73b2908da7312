"""Samples of fixed length: protocol, batches, epochs and prompts."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from data.truncation import Truncation

Batch = Mapping[str, np.ndarray]
"""Arrays [samples, ...] of a batch, by Hugging Face's names."""

IGNORE_INDEX = -100
"""Label of positions outside the loss, as in Hugging Face."""


class Samples(Protocol):
    """A sequence of samples that returns batches of chosen ones."""

    @property
    def truncation(self) -> Truncation: ...

    @property
    def digest(self) -> str:
        """Digest of all samples: equal digests mean the same tokens in the same order."""
        ...

    def __len__(self) -> int: ...

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Batch of the samples at `indices`, in their order."""
        ...


@runtime_checkable
class EpochSampler(Protocol):
    """Samples that choose the samples of each epoch."""

    def epoch_indices(self, seed: int, epoch: int) -> np.ndarray:
        """Sample indices of an epoch, int64 [n], unshuffled."""
        ...


def epoch_indices(samples: Samples, seed: int, epoch: int) -> np.ndarray:
    """Sample indices of an epoch, int64 [n], unshuffled; all, unless the samples choose."""
    if isinstance(samples, EpochSampler):
        return samples.epoch_indices(seed, epoch)
    return np.arange(len(samples))


def digest_arrays(*values: np.ndarray | int | None) -> str:
    """SHA-256 digest of arrays and numbers."""
    sha256 = hashlib.sha256()
    for value in values:
        array = np.ascontiguousarray(-1 if value is None else value)
        sha256.update(f"{array.dtype.str}{array.shape}".encode())
        sha256.update(array.data)
    return sha256.hexdigest()


def count_loss_tokens(batch: Batch) -> int:
    """Number of loss tokens in a batch; the loss is their mean."""
    return int(np.count_nonzero(batch["labels"] != IGNORE_INDEX))


def get_segment_ids(batch: Batch) -> np.ndarray:
    """Segment ids of a batch, 0 for padding; the attention mask, or all ones, if it has none."""
    for name in ("segment_ids", "attention_mask"):
        if name in batch:
            return batch[name]
    return np.ones_like(batch["input_ids"])


@dataclass(frozen=True)
class Prompts:
    """Token ids of prompts, padded on the right.

    Attributes:
        texts: the prompts before truncation.
        input_ids: int32 [n, length].
        mask: int32 [n, length], 1 = token.
        num_truncated: number of prompts that were longer and lost a part.
    """

    texts: Sequence[str]
    input_ids: np.ndarray
    mask: np.ndarray
    num_truncated: int

    def __len__(self) -> int:
        return len(self.input_ids)


def epoch_permutation(seed: int, epoch: int, count: int) -> np.ndarray:
    """Permutation of `count` samples in an epoch, int64 [count], from the arguments alone.

    It sorts raw output of the Philox generator instead of calling `permutation`: numpy guarantees
    that the former stays the same in later versions, but not the latter.
    """
    keys = np.random.Philox(np.random.SeedSequence([seed, epoch])).random_raw(count)
    return np.argsort(keys, kind="stable")
