"""Updates of variables: the tensor changed is returned twice, as result and as itself."""

from __future__ import annotations

import numpy as np
import torch

from popxl import ops
from popxl.ops import var_updates as up
from tests.popxl.ops.harness import OpRecord, rand

WHY = "variable updates are not differentiated"
T, X = rand(4, 3), rand(4, 3, seed=1)
T32, X16 = T.astype(np.float32), X.astype(np.float16)
F = np.array(0.75, np.float32)
SECOND = rand(4, 3, low=0.01, high=1.0, seed=2)
STEP = np.array(4.0, np.float32)


def _update(name, build, reference, inputs, dtypes=("float32", "float16"), outputs=None, **extra):
    """`build` changes its first input, of which it gets a copy."""

    def write(t, *rest):
        copy = ops.identity(t)
        return build(copy, *rest), copy

    def wanted(t, *rest):
        result = reference(t, *rest)
        return result, result

    outputs = None if outputs is None else outputs * 2
    return OpRecord(name, write, inputs, wanted, dtypes, False, WHY, outputs=outputs, **extra)


def _sparse(t, x, i, f=1.0):
    out = t.clone()
    for row, k in enumerate(i.tolist()):
        if 0 <= k < t.shape[0]:
            out[k] += f * x[row]
    return out


def _adam(m, v, step=None, weight=None, decay=0.0, betas=(0.9, 0.99), eps=1e-3):
    if step is not None:
        m, v = m / (1 - betas[0] ** (step + 1)), v / (1 - betas[1] ** (step + 1))
    update = m / (v.sqrt() + eps)
    return update if weight is None else update + decay * weight


def _updater(name, build, reference, inputs, dtypes=("float32", "float16"), outputs=("float32",)):
    return OpRecord(name, build, inputs, reference, dtypes, False, WHY, outputs=outputs)


def _corrected(m, v, step):
    counter = ops.identity(step)
    return up.adam_updater(m, v, time_step=counter, beta1=0.9, beta2=0.99, epsilon=1e-3), counter


def _corrected_tensors(m, v, step, weight, decay, b1, b2, eps):
    return up.lamb_updater(m, v, weight, ops.identity(step), decay, b1, b2, eps)


def _adamax(m, v, step, weight):
    return up.adamax_updater(m, v, weight, ops.identity(step), 0.1, 0.9, 1e-3)


def _norms(*values):
    return [np.array(v, np.float32) for v in values]


ACCUMULATE = [
    _update("accumulate_", up.accumulate_, lambda t, x: t + x, [T, X],
            ("float32", "float16", "bfloat16")),
    _update("accumulate_factor", lambda t, x: up.accumulate_(t, x, 0.25),
            lambda t, x: t + 0.25 * x, [T, X]),
    _update("accumulate_tensor", up.accumulate_, lambda t, x, f: t + f * x, [T32, X16, F],
            ("float32",)),
    _update("accumulate_square_", up.accumulate_square_, lambda t, x: t + x * x, [T, X]),
    _update("accumulate_square_factor", lambda t, x: up.accumulate_square_(t, x, 0.25),
            lambda t, x: t + 0.25 * x * x, [T32, X16 * 100], ("float32",)),
    _update("accumulate_maximum_", up.accumulate_maximum_, lambda t, x: t.maximum(x), [T, X]),
    _update("accumulate_mean_", lambda t, x: up.accumulate_mean_(t, x, 3.0),
            lambda t, x: (t * 3 + x) / 4, [T, X]),
    _update("accumulate_mean_tensor", up.accumulate_mean_, lambda t, x, s: (t * s + x) / (s + 1),
            [T, X, np.array(5, np.int32)]),
    _update("accumulate_moving_average_", lambda t, x: up.accumulate_moving_average_(t, x, 0.9),
            lambda t, x: 0.9 * t + 0.1 * x, [T, X]),
    _update("accumulate_moving_average_tensor", up.accumulate_moving_average_,
            lambda t, x, f: f * t + (1 - f) * x, [T32, X16, F], ("float32",)),
    _update("accumulate_moving_average_square_",
            lambda t, x: up.accumulate_moving_average_square_(t, x, 0.9),
            lambda t, x: 0.9 * t + 0.1 * x * x, [T, X]),
    _update("accumulate_moving_average_square_large",
            lambda t, x: up.accumulate_moving_average_square_(t, x, 0.9),
            lambda t, x: 0.9 * t + 0.1 * x * x, [T32, X16 * 1000], ("float32",)),
    _update("accumulator_scale_", lambda t: up.accumulator_scale_(t, 0.5), lambda t: 0.5 * t, [T]),
    _update("accumulator_scale_tensor", up.accumulator_scale_, lambda t, f: f * t, [T, F]),
    _update("accumulator_zero_", up.accumulator_zero_, torch.zeros_like,
            [np.array([1.0, np.inf, np.nan], np.float32)], ("float32",)),
    _update("sparse_accumulate_", up.sparse_accumulate_, _sparse,
            [T, rand(5, 3), np.array([1, 3, 1, 9, 0], np.uint32)]),
    _update("sparse_accumulate_factor", lambda t, x, i: up.sparse_accumulate_(t, x, i, 0, 0.5),
            lambda t, x, i: _sparse(t, x, i, 0.5), [T, rand(2, 3), np.array([-1, 2], np.int32)]),
    _update("sparse_accumulate_axis", lambda t, x, i: up.sparse_accumulate_(t, x, i, axis=1),
            lambda t, x, i: _sparse(t.T, x.T, i).T, [T, rand(4, 2), np.array([2, 2], np.int32)]),
]  # fmt: skip
OPTIMIZER = [
    _updater("adam_updater", lambda m, v: up.adam_updater(m, v, epsilon=1e-3),
             lambda m, v: _adam(m, v), [X, SECOND]),
    _updater("adam_updater_step", _corrected, lambda m, v, s: (_adam(m, v, s), s + 1),
             [X, SECOND, STEP], outputs=("float32", "float32")),
    _updater("adam_updater_int_step", _corrected, lambda m, v, s: (_adam(m, v, s), s + 1),
             [X, SECOND, np.array([0], np.int32)], outputs=("float32", "int32")),
    _updater("adam_updater_decay", lambda m, v, w: up.adam_updater(m, v, w, weight_decay=0.1,
             epsilon=1e-3), lambda m, v, w: _adam(m, v, None, w, 0.1), [X, SECOND, T]),
    _updater("lamb_updater", _corrected_tensors,
             lambda m, v, s, w, d, b1, b2, e: _adam(m, v, s, w, d, (b1, b2), e),
             [X, SECOND, STEP, T, *_norms(0.1, 0.9, 0.99, 1e-3)]),
    _updater("adamax_updater", _adamax,
             lambda m, v, s, w: m / (1 - 0.9 ** (s + 1)) / (v + 1e-3) + 0.1 * w,
             [X, SECOND, STEP, T]),
    _update("adam_var_update", lambda t, *r: up.adam_var_update(t, *r, 0.1, 1.5),
            lambda t, x, r1, r2: t - 0.1 * 1.5 / 2 * x, [T, X, *_norms(9.0, 4.0)]),
    _update("adam_var_update_unclipped", up.adam_var_update,
            lambda t, x, r1, r2, lr: t - lr * 3 / 2 * x, [T, X, *_norms(9.0, 4.0, 0.1)]),
    _update("adam_var_update_new_weight", lambda t, *r: up.adam_var_update(t, *r, 0.1),
            lambda t, x, r1, r2: t - 0.1 * x, [T, X, *_norms(0.0, 4.0)]),
    _update("adam_var_update_no_update", lambda t, *r: up.adam_var_update(t, *r, 0.1),
            lambda t, x, r1, r2: t - 0.1 * x, [T, X, *_norms(9.0, 0.0)]),
    _update("copy_var_update_", up.copy_var_update_, lambda t, x: x, [T, X]),
]  # fmt: skip
RECORDS = [*ACCUMULATE, *OPTIMIZER]
