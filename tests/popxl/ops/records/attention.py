"""Attention."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from popxl import ops
from tests.popxl.ops.harness import OpRecord, rand

ALL = ("float32", "float16", "bfloat16")


def _torch(q, k, v, *biases, scale=1.0):
    scores = (*q.shape[:-1], k.shape[-2])
    mask = sum((b.expand(scores) for b in biases), torch.zeros(scores, dtype=q.dtype))
    return scaled_dot_product_attention(q, k, v, mask, scale=scale)


def _attention(name, *inputs, scale=1.0, dtypes=ALL):
    return OpRecord(
        f"attention{name}",
        lambda q, k, v, *biases: ops.attention(q, k, v, biases, scale),
        inputs,
        lambda *ts: _torch(*ts, scale=scale),
        dtypes,
        tolerance=3,
        why="half types round the weights and the scores' gradients, each of which is summed over",
    )


RECORDS = [
    _attention("", rand(2, 3, 5, 4), rand(2, 3, 7, 4), rand(2, 3, 7, 6), scale=0.5),
    _attention("_matrices", rand(5, 4), rand(7, 4), rand(7, 4)),
    _attention("_one_query", rand(2, 1, 4), rand(2, 3, 4), rand(2, 3, 1)),
    _attention("_one_key", rand(2, 3, 4), rand(2, 1, 4), rand(2, 1, 4), dtypes=("float32",)),
    _attention("_biases", rand(2, 3, 5, 4), rand(2, 3, 7, 4), rand(2, 3, 7, 4, seed=1),
               rand(1, 3, 5, 7), rand(2, 1, 1, 7), rand(5, 7), scale=0.25),
    _attention("_large_scores", rand(5, 64, low=-9, high=9), rand(7, 64, low=-9, high=9),
               rand(7, 4), dtypes=("float32",)),
    OpRecord("attention_of_itself", lambda t: ops.attention(t, t, t), [rand(3, 6, 4)],
             lambda t: scaled_dot_product_attention(t, t, t, scale=1.0), ("float32",)),
]  # fmt: skip
