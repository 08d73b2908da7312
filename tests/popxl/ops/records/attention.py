"""Attention."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from popxl import ops
from tests.popxl.ops.harness import OpRecord, rand

HALF = ("float16", "bfloat16")
ALL = ("float32", *HALF)


def _torch(q, k, v, *biases, scale=1.0):
    scores = (*q.shape[:-1], k.shape[-2])
    mask = sum((b.expand(scores) for b in biases), torch.zeros(scores, dtype=q.dtype))
    return scaled_dot_product_attention(q, k, v, mask, scale=scale)


def _attention(name, *inputs, scale=1.0, dtypes=ALL, more=(), fused=None):
    return OpRecord(
        f"attention{name}",
        lambda q, k, v, *biases: ops.attention(q, k, v, biases, scale, fused=fused),
        [*inputs[:3], *(bias.astype(np.float32) for bias in inputs[3:])],
        lambda *ts: _torch(*ts, scale=scale),
        dtypes,
        tolerance=3,
        why="half types round the weights and the scores' gradients, each of which is summed over",
        more=more,
    )


def _seen(q, k, v, *numbers, window=None, cap=None, segments=False):
    """By the definition: heads of keys repeated, scores capped, a mask of trues and falses."""
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * 0.5
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    pairs = [tuple(t[:, None].long() for t in numbers[i : i + 2]) for i in (0, 2)]
    at, of = pairs[0] if numbers else (torch.arange(n.shape[2])[None, None] for n in (q, k))
    mask = of[..., None, :] <= at[..., None]
    if window is not None:
        mask = mask & (at[..., None] - of[..., None, :] < window)
    if segments:
        mask = mask & (pairs[1][0][..., None] == pairs[1][1][..., None, :])
    weights = torch.softmax(scores.masked_fill(~mask, -torch.inf), -1)
    return weights @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)


def _causal(
    name,
    *numbers,
    heads=(6, 2),
    lengths=(5, 5),
    segments=False,
    dtypes=ALL,
    more=(),
    fused=None,
    **settings,
):
    def ours(q, k, v, *numbers):
        pairs = {"positions": numbers[:2] or None, "segments": numbers[2:] or None}
        return ops.attention(q, k, v, (), 0.5, causal=True, fused=fused, **pairs, **settings)

    (h, g), (queries, keys) = heads, lengths
    inputs = rand(2, h, queries, 4), rand(2, g, keys, 4, seed=1), rand(2, g, keys, 3, seed=2)
    return OpRecord(
        f"attention_{name}",
        ours,
        [*inputs, *(np.array(n, np.int32) for n in numbers)],
        lambda *ts: _seen(*ts, segments=segments, **settings),
        dtypes,
        tolerance=3,
        why="as above",
        more=more,
    )


def _lengths(name, fused):
    """Keys past a sample's length are hidden."""

    def theirs(q, k, v, lengths):
        seen = torch.arange(k.shape[2]) < lengths.long()[:, None, None, None]
        return scaled_dot_product_attention(q, k, v, seen.expand(*q.shape[:-1], -1), scale=1.0)

    q, k, v = rand(2, 3, 5, 4), rand(2, 3, 7, 4, seed=1), rand(2, 3, 7, 4, seed=2)
    return OpRecord(
        f"attention{name}",
        lambda q, k, v, n: ops.attention(q, k, v, lengths=n, fused=fused),
        [q, k, v, np.array([4, 7], np.int32)],
        theirs,
        ("float32",),
    )


def _sinks(name, heads=(6, 2), lengths=(5, 7), dtypes=ALL, more=(), **settings):
    """By the definition: one more column of scores, dropped after the softmax."""

    def theirs(q, k, v, sinks, *biases):
        groups = q.shape[1] // k.shape[1]
        scores = q @ k.repeat_interleave(groups, 1).mT * 0.5 + sum(biases)
        column = sinks[None, :, None, None].expand(*scores.shape[:-1], 1)
        weights = torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1]
        return weights @ v.repeat_interleave(groups, 1)

    def ours(q, k, v, sinks, *biases):
        return ops.attention(q, k, v, biases, 0.5, sinks=sinks, **settings)

    (h, g), (queries, keys) = heads, lengths
    inputs = rand(2, h, queries, 4), rand(2, g, keys, 4, seed=1), rand(2, g, keys, 3, seed=2)
    biases = (b.astype(np.float32) for b in (rand(h, queries, keys, seed=4), rand(2, 1, 1, keys)))
    return OpRecord(
        name,
        ours,
        [*inputs, rand(h, seed=3), *biases],
        theirs,
        dtypes,
        tolerance=3,
        why="as above",
        more=more,
    )


_AT = [[0, 1, 2, 3, 4], [3, 4, 5, 6, 7]]
_SLOTS = [[0, 1, 2, 3, 4, 9, 9], [0, 1, 2, 9, 3, 4, 5]]
_TEXTS = [[1, 1, 2, 2, 2], [1, 2, 2, 0, 0]]
_ROW = [list(range(5))]

RECORDS = [
    _attention("", rand(2, 3, 5, 4), rand(2, 3, 7, 4), rand(2, 3, 7, 6), scale=0.5),
    _attention("_matrices", rand(5, 4), rand(7, 4), rand(7, 4), dtypes=("float32",), more=HALF),
    _attention("_one_query", rand(2, 1, 4), rand(2, 3, 4), rand(2, 3, 1), dtypes=("float32",),
               more=HALF),
    _attention("_one_key", rand(2, 3, 4), rand(2, 1, 4), rand(2, 1, 4), dtypes=("float32",)),
    _attention("_biases", rand(2, 3, 5, 4), rand(2, 3, 7, 4), rand(2, 3, 7, 4, seed=1),
               rand(1, 3, 5, 7), rand(2, 1, 1, 7), rand(5, 7), scale=0.25, dtypes=ALL[:2],
               more=("bfloat16",)),
    # Scores of about 100, whose exponentials are no float32.
    _attention("_large_scores", rand(5, 64, low=1, high=2),
               rand(1, 64, low=0.5, high=1.5) + rand(7, 64, low=-0.1, high=0.1), rand(7, 4),
               dtypes=("float32",)),
    replace(_attention("_one_weight_is_all", rand(5, 64, low=-9, high=9),
                       rand(7, 64, low=-9, high=9), rand(7, 4), dtypes=("float32",)),
            grad=False, why="the gradients of q and k are 0, and of float32 the rounding is left"),
    OpRecord("attention_of_itself", lambda t: ops.attention(t, t, t), [rand(3, 6, 4)],
             lambda t: scaled_dot_product_attention(t, t, t, scale=1.0), ("float32",)),
    _causal("causal_grouped", dtypes=("float32",), more=HALF),
    _causal("causal_window_cap", window=3, cap=0.7, heads=(4, 4), dtypes=ALL[:2],
            more=("bfloat16",)),
    _causal("causal_one_group", window=2, cap=0.3, heads=(3, 1), dtypes=(), more=("float32",)),
    _causal("causal_positions", _AT, _SLOTS, window=4, lengths=(5, 7), dtypes=("float32",)),
    _causal("causal_segments", _ROW, _ROW, _TEXTS, _TEXTS, window=2, segments=True,
            dtypes=("float32", "bfloat16"), more=("float16",)),
    _lengths("_lengths", fused=False),
    # More queries than a tile has, and not a multiple of them.
    _attention("_fused", rand(2, 3, 130, 4), rand(2, 3, 7, 4), rand(2, 3, 7, 6, seed=1),
               rand(1, 3, 130, 7), rand(2, 1, 1, 7), scale=0.5, fused=True, dtypes=("float32",),
               more=HALF),
    _causal("fused_causal", window=5, cap=0.7, lengths=(257, 257), fused=True,
            dtypes=("float32",)),
    _causal("fused_segments", _AT, _SLOTS, _TEXTS, [[1, 1, 2, 2, 2, 3, 3], [1, 2, 2, 3, 0, 0, 0]],
            lengths=(5, 7), segments=True, fused=True, dtypes=("float32",)),
    _lengths("_fused_lengths", fused=True),
    _sinks("attention_sinks", dtypes=ALL[:2], more=("bfloat16",)),
    _sinks("attention_fused_sinks", lengths=(130, 7), fused=True, dtypes=("float32", "bfloat16"),
           more=("float16",)),
]  # fmt: skip
