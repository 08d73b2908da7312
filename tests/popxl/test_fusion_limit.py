"""How many ops XLA's CPU compiler fuses: a kernel of thousands takes minutes to compile."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest

import popxl
from popxl import ops
from popxl._compile import fusion_limit
from popxl.ops._reductions import tracing_platform
from popxl.transforms import autodiff, gradient_ops
from tests.popxl.compiled import optimised
from tests.popxl.programs import graph_of, store
from tests.slow import slow


def chain(*ts: popxl.Tensor) -> popxl.Tensor:
    y = ts[0]
    for t in ts[1:]:
        y = ops.tanh(y * ts[0] + t)
    return y


def running_sum(*ts: popxl.Tensor) -> popxl.Tensor:
    y = total = ts[0]
    for t in ts[1:]:
        y = ops.sin(y + t)
        total = total + y * t
    return total


def residual(*ts: popxl.Tensor) -> popxl.Tensor:
    y = ts[0]
    for t in ts[1:]:
        y = y + ops.sin(y * t)
    return y


def turned_between(*ts: popxl.Tensor) -> popxl.Tensor:
    y = ts[0]
    for t in ts[1:]:
        y = ops.slice(ops.concat([ops.transpose(y), t]), 1, 5) * ts[0]
    return y


def calls(*ts: popxl.Tensor) -> popxl.Tensor:
    y, step = ts[0], graph_of(lambda y, t: ops.exp(ops.cos(y) - t), ts[0].spec, ts[0].spec)
    for t in ts[1:]:
        (y,) = ops.call(step, y, t)
    return y


def tree(*ts: popxl.Tensor) -> popxl.Tensor:
    """All of them used once, in few steps."""
    left = list(ts)
    while len(left) > 1:
        left = [ops.tanh(a + b) for a, b in zip(left[::2], left[1::2], strict=True)]
    return left[0]


def gradient(write: Callable[..., popxl.Tensor], *ts: popxl.Tensor) -> popxl.Tensor:
    """Gradient of the first tensor, which all others depend on; none of the others is needed."""
    graph = graph_of(write, *(t.spec for t in ts))
    back = autodiff(graph)
    info = ops.call_with_info(graph, *ts)
    seed = popxl.constant(np.ones(4, np.float32))
    return ops.call(back.graph, seed, inputs_dict=back.inputs_dict(info))[0]


def _compiled(write: Callable[..., popxl.Tensor], n: int) -> tuple[int, np.ndarray]:
    """The most instructions of XLA's in one kernel of a program, and what the program gives."""
    data = np.linspace(0.5, 1, n * 4, dtype=np.float32).reshape(n, 4)
    ir = popxl.Ir()
    with ir.main_graph:
        out = store(write(*[popxl.variable(x) for x in data]))
    with popxl.Session(ir) as session:
        kernels = optimised(session).split("\nENTRY")[0].split("\n}\n")
        return max(kernel.count(" = ") for kernel in kernels), session.run()[out]


PROGRAMS = [chain, running_sum, residual, turned_between, calls, tree]
GRADIENTS = {f: partial(gradient, f) for f in PROGRAMS}


@pytest.mark.parametrize(
    "write",
    [
        chain,
        GRADIENTS[chain],
        slow(GRADIENTS[residual]),
        slow(running_sum),
        *map(slow, PROGRAMS[2:]),
        *(slow(GRADIENTS[f]) for f in (running_sum, turned_between, calls, tree)),
    ],
)
def test_kernels_of_many_ops_are_cut(write, monkeypatch):
    whole, expected = _compiled(write, 64)
    monkeypatch.setattr(fusion_limit, "_MAX_OPS", 16)
    monkeypatch.setattr(gradient_ops, "_FUSED_TERMS", 4)
    longest, result = _compiled(write, 64)
    assert longest < 160 < whole  # some of our ops are several of XLA's
    np.testing.assert_allclose(result, expected, rtol=1e-5)


def test_only_a_cpu_needs_it():
    node, arrays = Mock(), [np.zeros(2)]
    for target in ("gpu 9.0", "tpu"):
        with tracing_platform(target):
            assert fusion_limit.FusionLimiter().limit_fusion(node, arrays, arrays) is arrays


@pytest.mark.slow  # seconds, or without a bound minutes
def test_the_gradient_of_five_hundred_steps_compiles():
    longest, _ = _compiled(partial(gradient, chain), 500)
    assert longest < 1000
