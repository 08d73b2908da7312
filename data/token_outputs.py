"""Samples with a frozen model's outputs for their loss tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from data.samples import IGNORE_INDEX, ExtendedSamples, Samples

TEACHER_IDS, TEACHER_LOGPS, TEACHER_REST = "teacher_ids", "teacher_logps", "teacher_rest"
"""Arrays of a batch: a teacher's likeliest tokens, see `modelling.objectives.distillation`."""

TEACHER_STATES = "teacher_states"
"""Array of a batch: a teacher's last hidden states."""

_BATCH = 64  # samples whose loss tokens are counted at a time


class FrozenTokenOutputs(Protocol):
    """Interface of a frozen model's outputs: a row for each loss token of each sample."""

    def rows(self, samples: Sequence[int] | np.ndarray) -> np.ndarray:
        """Returns the rows of the samples at these indices, one after the other."""
        ...


@dataclass(frozen=True)
class SamplesWithTokenOutputs(ExtendedSamples):
    """Samples with a frozen model's outputs for their loss tokens.

    Attributes:
        outputs: rows of their loss tokens; the dtype's fields are the names of a batch's arrays.
    """

    outputs: FrozenTokenOutputs

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Batch of the samples at `indices`, in their order: arrays by name.

        Arrays of the outputs are [sequences, length, ...], 0 where there is no label.
        """
        batch = self.samples.take(indices)
        return batch | scatter_rows(self.outputs.rows(np.asarray(indices)), batch["labels"])


def scatter_rows(rows: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
    """Place rows of loss tokens in zero arrays [sequences, length, ...], one for each field."""
    places, arrays = labels != IGNORE_INDEX, {}
    for name in rows.dtype.names or ():
        values = rows[name]
        arrays[name] = np.zeros((*labels.shape, *values.shape[1:]), values.dtype)
        arrays[name][places] = values
    return arrays


def top_tokens_dtype(k: int) -> np.dtype:
    """Row of a teacher's outputs: k token ids, their log-probabilities, the rest's log-mass."""
    return np.dtype([
        (TEACHER_IDS, "<i4", (k,)), (TEACHER_LOGPS, "<f2", (k,)), (TEACHER_REST, "<f4")
    ])  # fmt: skip


def states_dtype(hidden_size: int, dtype: np.dtype) -> np.dtype:
    """Row of a teacher's outputs: its last hidden state."""
    return np.dtype([(TEACHER_STATES, dtype, (hidden_size,))])


def top_tokens_rows(values: np.ndarray, k: int) -> np.ndarray:
    """Convert the values of loss tokens, float32 [tokens, 2 k + 1], to rows of a teacher's outputs.

    Log-probabilities that float16 cannot hold become its lowest number.
    """
    rows = np.empty(len(values), top_tokens_dtype(k))
    rows[TEACHER_IDS] = values[:, :k]
    rows[TEACHER_LOGPS] = np.maximum(values[:, k:-1], np.finfo(np.float16).min)
    rows[TEACHER_REST] = values[:, -1]
    return rows


def loss_tokens_per_sample(samples: Samples) -> np.ndarray:
    """Number of loss tokens of each sample, int64 [n]."""
    counts = [np.zeros(0, np.int64)]
    for start in range(0, len(samples), _BATCH):
        indices = np.arange(start, min(start + _BATCH, len(samples)))
        in_loss = samples.take(indices)["labels"] != IGNORE_INDEX
        counts.append(np.count_nonzero(in_loss.reshape(len(indices), -1), axis=1))
    return np.concatenate(counts)


def select_loss_tokens(stats: np.ndarray, batch: Mapping[str, np.ndarray]) -> np.ndarray:
    """Select the values of loss tokens, [tokens, values], from those of all tokens.

    Args:
        stats: [n, sequences of a sample, length, values].
        batch: the samples.
    """
    by_token = stats.reshape(*batch["labels"].shape, -1)
    return by_token[batch["labels"] != IGNORE_INDEX]
