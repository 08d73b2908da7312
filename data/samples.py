"""Samples of fixed length: protocols, truncation, and packing of sequences.

Several token sequences may share a sample, so that less of a batch is padding. Each has a number,
its segment, and attends to tokens of its own segment only; so a sample computes what its sequences
would compute alone (Raffel et al., arXiv:1910.10683, section 3.1.2, pack theirs the same way).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from config.task import OnLongTarget

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
        texts: what the tokens say, before any are cut.
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


# ---- lengths ------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Truncation:
    """Counts of truncated prompts and targets, and of dropped examples."""

    prompts: int = 0
    targets: int = 0
    dropped: int = 0

    def __add__(self, other: Truncation) -> Truncation:
        return Truncation(
            self.prompts + other.prompts,
            self.targets + other.targets,
            self.dropped + other.dropped,
        )

    def notes(self, length: int) -> list[str]:
        """Messages about truncation; `length`: tokens of a sample."""
        counts = (
            (self.prompts, f"{self.prompts} cut to {length} tokens"),
            (self.targets, f"{self.targets} with a target cut"),
            (self.dropped, f"{self.dropped} dropped, whose target is too long"),
        )
        return [note for count, note in counts if count]


NO_TRUNCATION = Truncation()


@dataclass(frozen=True)
class TokenLimit:
    """Maximum tokens of a sequence, and the setting that limits them.

    Attributes:
        field: of the configuration, that sets it.
        made_for: tokens that the model was made for; None: it knows no limit.
    """

    tokens: int
    field: str
    max_position_embeddings: int | None = None

    def advice(self, tokens: int) -> str:
        """Advice for a sequence with more tokens."""
        alternative = "--data.on_long_target truncate or skip"
        if self.max_position_embeddings is not None and tokens > self.max_position_embeddings:
            return f"the model was made for {self.max_position_embeddings}: give {alternative}"
        return f"give --{self.field} {tokens} or more, or {alternative}"


class TooLongError(ValueError):
    """An example that does not fit into a sample.

    Attributes:
        index: which one.
    """

    def __init__(self, index: int, message: str) -> None:
        super().__init__(message)
        self.index = index


def truncate_targets(
    tokens: Iterable[np.ndarray],
    texts: Sequence[str],
    limit: TokenLimit,
    on_long_target: OnLongTarget,
) -> tuple[list[int], list[np.ndarray], Truncation]:
    """Truncate, drop or refuse targets beyond the limit.

    Args:
        tokens: of each target, the end token included.
        texts: the targets, for messages.

    Returns:
        The indices of the examples that are kept, their targets' tokens, and what was left out.

    Raises:
        TooLong: one is longer, and `on_long_target` is "error".
    """
    rows, length = list(tokens), limit.tokens
    too_long = [i for i, row in enumerate(rows) if len(row) > length]
    if too_long and on_long_target == "error":
        longest = max(too_long, key=lambda i: len(rows[i]))
        text = texts[longest] if len(texts[longest]) <= 40 else f"{texts[longest][:37]}..."
        raise TooLongError(
            longest,
            f"the target {text!r} has {len(rows[longest])} tokens with the end token, but "
            f"{limit.field} is {length}: {limit.advice(len(rows[longest]))}",
        )
    if on_long_target == "skip":
        dropped = set(too_long)
        indices = [i for i in range(len(rows)) if i not in dropped]
        return indices, [rows[i] for i in indices], Truncation(dropped=len(too_long))
    for i in too_long:  # the end token stays
        rows[i] = np.append(rows[i][: length - 1], rows[i][-1])
    return list(range(len(rows))), rows, Truncation(targets=len(too_long))


def left_truncated_indices(size: int, length: int, num_fixed: int) -> np.ndarray:
    """Indices that remain when a sequence is truncated on the left, int64 [at most length].

    Args:
        num_fixed: tokens before that beginning, such as `<bos>`, which stay.
    """
    num_fixed, num_removed = min(num_fixed, length), max(size - length, 0)
    indices = np.arange(size - num_removed)
    return np.where(indices < num_fixed, indices, indices + num_removed)


# ---- packing ------------------------------------------------------------------------------------
EMPTY_SLOT = -1
"""Placeholder index of an unused slot in a sample."""


def pack_sequences(
    lengths: Sequence[int] | np.ndarray, capacity: int, max_per_sample: int
) -> np.ndarray:
    """Pack sequences into samples, best fit decreasing.

    Best fit, longest first: a sequence goes to the sample that it fills best, or opens one.
        `max_per_sample`
    1 keeps the order.

    Args:
        lengths: tokens of each sequence, from 1 to `capacity`.
        capacity: tokens of a sample.
        max_per_sample: sequences of a sample, at most.

    Returns:
        int64 [samples, most]: the indices of each sample's sequences, then `EMPTY_SLOT`.
    """
    if max_per_sample == 1:
        return np.arange(len(lengths)).reshape(-1, 1)
    samples: list[list[int]] = []
    open_samples: list[list[int]] = [
        [] for _ in range(capacity + 1)
    ]  # by the tokens they have left
    room_bits = 0  # bit r: open_samples[r] is not empty
    for index in np.argsort(-np.asarray(lengths), kind="stable").tolist():
        length = int(lengths[index])
        fitting_bits = room_bits >> length
        if fitting_bits:
            free = length + _lowest_bit(fitting_bits)
            sample = open_samples[free].pop()
            if not open_samples[free]:
                room_bits ^= 1 << free
        else:
            free, sample = capacity, len(samples)
            samples.append([])
        samples[sample].append(index)
        if len(samples[sample]) < max_per_sample and free > length:
            open_samples[free - length].append(sample)
            room_bits |= 1 << (free - length)
    out = np.full((len(samples), max_per_sample), EMPTY_SLOT, np.int64)
    for slots, indices in zip(out, samples, strict=True):
        slots[: len(indices)] = indices
    return out


def _lowest_bit(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


def concatenate_sequences(
    samples: np.ndarray, tokens_of: Callable[[int], np.ndarray], capacity: int, pad: int
) -> tuple[np.ndarray, np.ndarray]:
    """Concatenate the sequences of each sample; returns token ids and segment ids.

    Args:
        samples: what `pack_sequences` returns, or some of it.
        tokens_of: the tokens of the sequence at an index.

    Returns:
        The tokens, and the number of each one's place in the sample, from 1 (0: padding), int32
        [samples, capacity] both.
    """
    input_ids = np.full((len(samples), capacity), pad, np.int32)
    segment_ids = np.zeros_like(input_ids)
    for sample, indices in enumerate(samples):
        start = 0
        for number, index in enumerate(indices[indices != EMPTY_SLOT], 1):
            tokens = tokens_of(index)
            end = start + len(tokens)
            input_ids[sample, start:end], segment_ids[sample, start:end] = tokens, number
            start = end
    return input_ids, segment_ids
