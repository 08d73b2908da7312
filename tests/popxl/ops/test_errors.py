"""Misuse: the error names the op, the tensor and what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.errors import SpecError

A = popxl.TensorSpec((2, 6), popxl.float32)
HALF = popxl.TensorSpec((2, 6), popxl.float16)
INT = popxl.TensorSpec((2, 6), popxl.int32)
SEED = popxl.TensorSpec((2,), popxl.uint32)

WRONG: list[tuple[str, tuple[popxl.TensorSpec, ...], Callable[..., Any], str]] = [
    ("dtypes", (A, HALF), ops.add, "add.*float32.*float16.*ops.cast"),
    ("dtypes of where", (INT, A, HALF), ops.where, "where.*one dtype"),
    ("dtypes of layers", (A, INT), ops.matmul, "matmul.*one dtype"),
    ("shapes", (A, A), ops.matmul, r"matmul\(.*\[2, 6\]"),
    ("integers in exp", (INT,), ops.exp, "exp.*floating-point.*int32"),
    ("softmax axis", (A,), lambda t: ops.softmax(t, 2), "softmax: axis 2.*(2, 6)"),
    ("sum axis", (A,), lambda t: ops.sum(t, [0, -3]), "sum: axis -3"),
    ("axis twice", (A,), lambda t: ops.max(t, [0, -2]), "max: axis.*twice"),
    ("in place broadcast", (A,), lambda t: ops.add_(ops.slice(t, 0, 1), t), "add_.*in place"),
    ("reshape", (A,), lambda t: ops.reshape(t, (5, -1)), r"reshape.*cannot be reshaped to"),
    ("reshape two", (A,), lambda t: ops.reshape(t, (-1, -1)), "reshape.*one -1"),
    ("reshape count", (A,), lambda t: t.reshape((3, 5)), "cannot be reshaped"),
    ("squeeze", (A,), lambda t: ops.squeeze(t, [0]), "squeeze: axes .0."),
    ("permutation", (A,), lambda t: ops.transpose(t, (0, 0)), "transpose: permutation"),
    ("no tensors", (), lambda: ops.concat([]), "concat: at least one"),
    ("equal parts", (A,), lambda t: ops.split(t, 4, 1), "split.*no 4 equal parts"),
    ("slice lists", (A,), lambda t: ops.slice(t, [0, 1], [1]), "slice:.*start has 2, stop has 1"),
    ("slice step", (A,), lambda t: ops.slice(t, step=0), "slice: step 0"),
    ("slice axis", (A,), lambda t: ops.slice(t, 0, 1, axis=2), "slice: axis 2"),
    ("levels", (A,), lambda t: ops.histogram(t, [1.0, 0.0], False), "levels .* must increase"),
    ("no level", (A,), lambda t: ops.histogram(t, [np.nan], False), "levels .* must increase"),
    ("strides", (A,), lambda t: ops.subsample(t, [2, 1, 1]), "subsample: strides"),
    ("bool index", (A,), lambda t: t[True], "cannot be indexed with True"),
    ("text index", (A,), lambda t: t["a"], "cannot be indexed with 'a'"),
    ("clip", (A,), lambda t: ops.clip(t, 2, 1), "clip: min=2 is above max=1"),
    ("modulus", (INT,), lambda t: ops.increment_mod(t, 1, 0), "increment_mod: the modulus"),
    ("indices", (A, A), ops.gather, "gather: indices.*float32"),
    ("groups", (A, INT), lambda t, i: ops.groupedgather(t, i, 0, 3), "groupedgather: the first"),
    ("scatter", (A, INT, HALF), ops.scatter, "scatter.*float16.*ops.cast"),
    ("topk", (A,), lambda t: ops.topk(t, 7, 1, True, True), "topk: k=7"),
    ("one-hot", (INT, INT), lambda t, n: ops.onehot(t, n, n, 0), "onehot: num_classes.*constant"),
    ("dynamic size", (A, SEED), lambda t, i: ops.dynamic_slice(t, i, [0, 1], [1, 7], True),
     "dynamic_slice: size 7"),
    ("dynamic index", (A, SEED), lambda t, i: ops.dynamic_slice(t, i, [0], [1], True),
     "dynamic_slice.*2 elements for 1 axes"),
    ("probability", (A, SEED), lambda t, s: ops.dropout(t, s, 1.0), r"\[0, 1\), not 1.0"),
    ("seed", (A, INT), lambda t, s: ops.dropout(t, s, 0.1), "a seed must be uint32"),
    ("reduction", (A, INT), lambda p, l: ops.nll_loss(p, l, reduction="max"), "nll_loss.*'max'"),
    ("labels", (A, INT), ops.nll_loss, "nll_loss.*labels"),
    ("cast to no dtype", (A,), lambda t: ops.cast(t, "float33"), "no popxl dtype for 'float33'"),
    ("cast to nothing", (A,), lambda t: ops.cast(t, None), "no popxl dtype for None"),
    ("cast to 64 bits", (A,), lambda t: ops.cast(t, popxl.int64), "no elements of 64 bits"),
    ("init of no dtype", (), lambda: ops.init((2,), "float33"), "no popxl dtype for 'float33'"),
    ("negative size", (), lambda: ops.init((-2,), popxl.float32), "no number below 0"),
    ("cast to float8", (A,), lambda t: ops.cast(t, popxl.float8_143), "pow2scale_cast_to_fp8"),
    ("norm", (A, SEED, SEED), ops.layer_norm, "layer_norm.*weight has shape"),
    ("decay", (A, A), lambda m, v: ops.var_updates.adam_updater(m, v, weight_decay=0.1),
     "weight_decay needs the weight"),
    ("betas", (A, A, SEED), lambda m, v, s: ops.var_updates.adam_updater(m, v, time_step=s),
     "needs beta1 and beta2"),
    ("AdaMax", (A, A), ops.var_updates.adamax_updater, "time_step is needed"),
    ("copy", (A, HALF), ops.var_updates.copy_var_update_, "copy_var_update_.*copy of float16"),
    ("factor", (A, A), lambda t, f: ops.scaled_add(t, t, a=f), "a must be a scalar"),
    ("sparse", (A, A, SEED), lambda t, x, i: ops.var_updates.sparse_accumulate_(t, x, i, 1),
     "6 slices along axis 1"),
]  # fmt: skip


# Each takes a tensor `t` of the current graph, float32 (2, 6).
MISUSED: list[tuple[str, Callable[..., Any], str]] = [
    ("an array", lambda t: ops.sum(np.ones(2)), "sum at .* takes tensors, but got array.*constant"),
    ("a number", lambda t: ops.softmax(2.0, 0), "softmax at .* takes tensors, but got 2.0"),
    ("an index", lambda t: ops.gather(t, 1), "gather at .* takes tensors, but got 1"),
    ("a list", lambda t: ops.reshape([1, 2], (2, 1)), "reshape at .* takes tensors"),
    ("a tensor for a list", lambda t: ops.concat(t), "concat takes a list of tensors"),
    ("an array to store", lambda t: ops.host_store(popxl.d2h_stream((2,), popxl.float32), [1.0]),
     "host_store at .* takes tensors"),
    ("numpy's function", np.tanh, "tensor .* has no value while the program is written"),
    ("numpy's array", np.asarray, "tensor .* has no value while the program is written"),
    ("float", float, "tensor .* is no number while the program is written"),
    ("int", int, "tensor .* is no number while the program is written"),
    ("a tensor's count", lambda t: ops.repeat(popxl.gir().create_graph(ops.exp, t), t, t),
     "repeat: repeat_count is known when the program is written"),
    ("half a count", lambda t: ops.repeat(popxl.gir().create_graph(ops.exp, t), 1.5, t),
     "repeat: repeat_count must be an integer, not 1.5"),
    ("no gradient", lambda t: popxl.transforms.autodiff(
        popxl.gir().create_graph(lambda t: ops.argmax(t, 0), t)),
     r"autodiff: graph .* has no floating-point output \(argmax_out int32\)"),
]  # fmt: skip


@pytest.mark.parametrize(("build", "message"), [m[1:] for m in MISUSED],
                         ids=[m[0] for m in MISUSED])  # fmt: skip
def test_misuse_is_named(build: Any, message: str) -> None:
    with (
        popxl.Ir().main_graph,
        pytest.raises((ValueError, TypeError), match=message),
    ):
        build(popxl.variable(np.ones((2, 6), np.float32)))


def test_arrays_still_come_first_in_operators() -> None:
    with popxl.Ir().main_graph:
        t = popxl.variable(np.ones(2, np.float32))
        for made in (np.ones(2, np.float32) + t, np.float32(2) * t, np.ones(2) - t):
            assert made.shape == (2,)


def test_a_tensor_of_another_ir_is_told_from_one_of_another_graph() -> None:
    with popxl.Ir().main_graph:
        other = popxl.variable(np.ones(2, np.float32), name="weight")
    ir = popxl.Ir()
    with ir.main_graph:
        t = popxl.variable(np.ones(2, np.float32))
        graph = ir.create_graph(ops.exp, t)
        for use in (lambda: ops.add(other, t), lambda: ops.call(graph, other)):
            with pytest.raises(ValueError, match="'weight' belongs to another Ir"):
                use()
        with pytest.raises(ValueError, match="belongs to graph .*: pass it as an input"):
            ops.add(graph.inputs[0], t)


@pytest.mark.parametrize(("specs", "build", "message"), [w[1:] for w in WRONG],
                         ids=[w[0] for w in WRONG])  # fmt: skip
def test_message(specs: tuple[popxl.TensorSpec, ...], build: Any, message: str) -> None:
    ir = popxl.Ir()
    # ValueError, TypeError: a SpecError is both
    with pytest.raises((ValueError, TypeError), match=message):
        ir.create_graph(lambda *ts: build(*ts), *specs)


def test_spec_errors_name_the_line() -> None:
    with pytest.raises(SpecError, match=r"test_errors\.py:\d+"):
        popxl.Ir().create_graph(ops.add, A, HALF)


def test_the_graph_is_unchanged_after_an_error() -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        t = popxl.variable(np.ones(3, np.float32))
        with pytest.raises(SpecError):
            ops.add(t, popxl.constant(1, popxl.int32))
        assert ir.main_graph.ops == ()
