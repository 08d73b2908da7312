"""Reductions."""

from __future__ import annotations

import numpy as np
import torch

from popxl import ops
from tests.popxl.ops.harness import OpRecord, ints, rand

A = rand(2, 3, 5)
POSITIVE = rand(2, 3, 5, low=0.2, high=2.0)
INTEGER = "integer output"
ALL = ("float32", "float16", "bfloat16")


def _reduction(name, op, reference, x=A, dtypes=("float32",), all_ways=False):
    """The ways to say which axes: all, and a list that is kept; for some ops also the others."""
    ways = {
        "": ((), {}, (0, 1, 2), False),
        "_one": ((-1,), {}, (2,), False),
        "_list": (([0, 2],), {"keepdims": True}, (0, 2), True),
        "_all_kept": ((), {"keepdims": True}, (0, 1, 2), True),
    }
    return [
        OpRecord(
            name + label,
            lambda t, a=args, k=kwargs: op(t, *a, **k),
            [x],
            lambda t, a=axes, k=keep: reference(t, a, k),
            dtypes[:2] if label else dtypes,
            more=dtypes[2:] if label else (),
        )
        for label, (args, kwargs, axes, keep) in ways.items()
        if all_ways or label in ("", "_list")
    ]


def _product(t, axes, keep):
    for axis in sorted(axes, reverse=True):
        t = t.prod(axis, keepdim=keep)
    return t


def _lower_median(t, axes, keep):
    order = [i for i in range(t.ndim) if i not in axes] + list(axes)
    kept = [1 if i in axes else n for i, n in enumerate(t.shape)]
    rows = t.permute(order).flatten(t.ndim - len(axes))
    middle = rows.median(-1).values
    return middle.reshape(kept) if keep else middle


RECORDS = [
    *_reduction("sum", ops.sum, lambda t, a, k: t.sum(a, k), dtypes=ALL, all_ways=True),
    *_reduction("mean", ops.mean, lambda t, a, k: t.mean(a, k), dtypes=ALL[:2]),
    *_reduction("max", ops.max, lambda t, a, k: t.amax(a, k)),
    *_reduction("min", ops.min, lambda t, a, k: t.amin(a, k)),
    *_reduction("prod", ops.prod, _product, POSITIVE),
    *_reduction("median", ops.median, _lower_median, all_ways=True),
    *_reduction("sumsquare", ops.sumsquare, lambda t, a, k: (t * t).sum(a, k), dtypes=ALL[:2]),
    *_reduction("l1", ops.l1, lambda t, a, k: t.abs().sum(a, k)),
    *_reduction("l2", ops.l2, lambda t, a, k: (t * t).sum(a, k).sqrt()),
    *_reduction("logsum", ops.logsum, lambda t, a, k: t.sum(a, k).log(), POSITIVE),
    *_reduction("logsumexp", ops.logsumexp, lambda t, a, k: torch.logsumexp(t, a, k),
                dtypes=ALL[:2]),
    OpRecord("logsumexp_large", ops.logsumexp, [A * 200], lambda t: torch.logsumexp(t, (0, 1, 2))),
    OpRecord("l1_at_0", ops.l1, [np.array([0.0, -1.0])], lambda t: t.abs().sum()),
    OpRecord("max_ties", ops.max, [np.array([1.0, 3.0, 3.0])], torch.amax),
    OpRecord("sum_many", ops.sum, [np.full(5000, 0.1)], torch.sum, ("float16",)),
    OpRecord("sum_int", ops.sum, [ints(4, high=9, dtype=np.int8)], torch.sum, ("float32",), False,
             "integers", outputs=("int8",)),
    OpRecord("lamb_square", ops.lamb_square, [A], lambda t: (t * t).sum(), outputs=("float32",)),
    OpRecord("argmax", ops.argmax, [A], lambda t: t.argmax(0), grad=False, why=INTEGER,
             outputs=("int32",)),
    OpRecord("argmax_last", lambda t: ops.argmax(t, -1, True), [A],
             lambda t: t.argmax(-1, True), grad=False, why=INTEGER, outputs=("int32",)),
    OpRecord("argmax_flat", lambda t: ops.argmax(t, None), [A], torch.argmax, grad=False,
             why=INTEGER, outputs=("int32",)),
    OpRecord("argmin", lambda t: ops.argmin(t, 1), [A], lambda t: t.argmin(1), grad=False,
             why=INTEGER, outputs=("int32",)),
    OpRecord("cumsum", lambda t: ops.cumsum(t, -1), [A], lambda t: t.cumsum(-1)),
    OpRecord("cumsum_first", ops.cumsum, [A], lambda t: t.cumsum(0)),
]  # fmt: skip
