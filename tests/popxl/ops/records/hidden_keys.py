"""Attention whose masks hide all keys of some queries, and causal attention of every rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from popxl import ops
from tests.popxl.ops.harness import OpRecord, rand

QUERIES, KEYS = 6, 3
AT, OF = np.arange(QUERIES)[:, None], np.arange(KEYS)


def _records(
    label: str, seen: np.ndarray, name: str = "", *inputs: np.ndarray, **settings: Any
) -> list[OpRecord]:
    """Plain and in tiles; `inputs` are those of the setting `name`, a tensor or a pair."""

    def of(fused: bool) -> OpRecord:
        def ours(q: Any, k: Any, v: Any, *given: Any) -> Any:
            several = name in ("positions", "segments", "biases")
            more = {name: given if several else given[0]} if given else {}
            return ops.attention(q, k, v, **more, **settings, fused=fused)

        def theirs(q: Any, k: Any, v: Any, *given: Any) -> Any:
            scores = (2, 2, QUERIES, KEYS)
            mask = torch.zeros(scores, dtype=q.dtype) + (given[0] if name == "biases" else 0)
            mask = mask.masked_fill(~torch.tensor(seen), -torch.inf)
            return scaled_dot_product_attention(q, k, v, mask, scale=1.0)

        qkv = [rand(2, 2, n, 4, seed=i) for i, n in enumerate((QUERIES, KEYS, KEYS))]
        kind = "_fused" if fused else ""
        return OpRecord(
            f"attention_hidden_by_{label}{kind}", ours, [*qkv, *inputs], theirs, ("float32",)
        )

    return [of(fused) for fused in (False, True)]


def _rank(*leading: int, is_slow: bool = False) -> OpRecord:
    """The last tile has fewer queries than others."""
    dtypes = ("float32",)

    def theirs(q: Any, k: Any, v: Any) -> Any:
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)

    return OpRecord(
        f"attention_causal_of_rank_{len(leading) + 2}",
        lambda q, k, v: ops.attention(q, k, v, causal=True, fused=True),
        [rand(*leading, 130, 4, seed=i) for i in range(3)],
        theirs,
        () if is_slow else dtypes,
        more=dtypes if is_slow else (),
    )


_TEXTS = [np.array([[0, 0, 1, 1, 7, 7]], np.int32), np.array([[1, 0, 0]], np.int32)]
_PLACES = [np.array([[5, 0, 2, 3, 1, 9]], np.int32), np.array([[2, 4, 8]], np.int32)]
_LOW = np.where(OF == 0, np.finfo(np.float32).min, 0).astype(np.float32) + 0 * AT
_LOWEST = np.where((AT > 1) & (OF != AT % 4), 0, -np.inf).astype(np.float32)

RECORDS = [
    *_records(
        "lengths", np.array([0, 2])[:, None, None, None] > OF, "lengths", np.array([0, 2], np.int32)
    ),
    *_records("a_window", (OF <= AT) & (AT - OF < 2), causal=True, window=2),
    *_records("segments", _TEXTS[1] == _TEXTS[0].T, "segments", *_TEXTS),
    *_records("positions", _PLACES[1] <= _PLACES[0].T, "positions", *_PLACES, causal=True),
    *_records("infinite_biases", np.isfinite(_LOWEST), "biases", _LOWEST),
    # The only key of the first query has the lowest of finite biases.
    *_records("causality_and_biases", OF <= AT, "biases", _LOW, causal=True),
    _rank(),
    _rank(2, is_slow=True),
    _rank(2, 1, 2),
]
