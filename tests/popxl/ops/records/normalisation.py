"""Normalisations."""

from __future__ import annotations

import torch.nn.functional as F

from popxl import ops
from tests.popxl.ops.harness import OpRecord, rand

ALL = ("float32", "float16", "bfloat16")
X, IMAGE = rand(6, 8), rand(2, 4, 3, 2)
SMALL = "sums of many terms, each rounded"


def _layer_norm(t, weight, bias):
    return F.layer_norm(t, t.shape[-1:], weight, bias, 1e-5)


def _group_norm(groups):
    return lambda t, weight, bias: F.group_norm(t, groups, weight, bias, 1e-3)


def _batch_norm(t, scale, bias, mean, var):
    """By hand: torch does not differentiate with respect to the statistics."""
    s, b, m, v = (p.reshape(-1, 1, 1) for p in (scale, bias, mean, var))
    return (t - m) / (v + 1e-5).sqrt() * s + b


RECORDS = [
    OpRecord("layer_norm", ops.layer_norm, [X, rand(8), rand(8, seed=1)], _layer_norm, ALL,
             tolerance=2, why=SMALL),
    OpRecord("layer_norm_3d", ops.layer_norm, [rand(2, 3, 8), rand(8), rand(8, seed=1)],
             _layer_norm, tolerance=2, why=SMALL),
    OpRecord("layer_norm_shifted", ops.layer_norm, [X + 100, rand(8), rand(8, seed=1)],
             _layer_norm, ("float32",), tolerance=10, why="a mean of 100 costs two digits"),
    OpRecord("group_norm", lambda t, w, b: ops.group_norm(t, w, b, 2, 1e-3),
             [IMAGE, rand(4), rand(4, seed=1)], _group_norm(2), tolerance=2, why=SMALL),
    OpRecord("group_norm_one", lambda t, w, b: ops.group_norm(t, w, b, 1, 1e-3),
             [X, rand(8), rand(8, seed=1)], _group_norm(1), tolerance=2, why=SMALL),
    OpRecord("batch_norm_inference", ops.batch_norm_inference,
             [IMAGE, rand(4), rand(4, seed=1), rand(4, seed=2), rand(4, low=0.5, high=2.0)],
             _batch_norm),
]  # fmt: skip
