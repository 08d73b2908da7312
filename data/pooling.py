"""Tokens whose vectors stand for a sequence: its last one, its end token, or all.

They are an array of a batch, `POOLED_IDS`, int32 [n, length]: the segment id of each pooled token,
0 for the others.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

POOLED_IDS = "pooled_ids"

Pooling = Literal["mean", "last", "eos", "last_non_pad"]
"""mean: all tokens of a segment; last: its last; eos: its last end token; last_non_pad: its last
one that is not the padding token, as in transformers' classifiers, or its first."""


def find_pooled_ids(
    segment_ids: np.ndarray, pooling: Pooling, input_ids: np.ndarray, eos: int = -1, pad: int = -1
) -> np.ndarray:
    """Returns the segment ids of the tokens that are pooled, int32 [n, length].

    Args:
        segment_ids: int32 [n, length]; the tokens of a segment follow each other, 0 is padding.
        input_ids: int32 [n, length].
        eos, pad: ids of the end token and of the padding token, where `pooling` needs them.
    """
    if pooling == "mean":
        return segment_ids
    is_candidate = segment_ids > 0
    if pooling == "eos":
        is_candidate &= input_ids == eos
    elif pooling == "last_non_pad":
        is_first = np.diff(segment_ids, axis=1, prepend=0) != 0
        is_candidate &= (input_ids != pad) | is_first
    # A candidate is the last of its segment if no later one has its id.
    rows, columns = np.nonzero(is_candidate)
    keys = rows * (int(segment_ids.max(initial=0)) + 1) + segment_ids[rows, columns]
    is_last = np.diff(keys, append=-1) != 0
    pooled = np.zeros_like(segment_ids)
    pooled[rows[is_last], columns[is_last]] = segment_ids[rows[is_last], columns[is_last]]
    return pooled
