"""Loops have the gradients of their unrolled calls, whatever the ops inside say of theirs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.transforms import GradGraphInfo, autodiff
from tests.popxl.programs import f32, run

pytestmark = pytest.mark.usefixtures("compiled_quickly")

X, W = f32(4, 3), f32(3, 3, seed=1)
COUNT = 3


def _unrolled(step: popxl.Graph, x: popxl.Tensor, *rest: popxl.Tensor) -> popxl.Tensor:
    for _ in range(COUNT):
        (x,) = ops.call(step, x, *rest)
    return x


def _looped(step: popxl.Graph, x: popxl.Tensor, *rest: popxl.Tensor) -> popxl.Tensor:
    return ops.repeat(step, COUNT, x, *rest)[0]


def _gradients(step: Callable, form: Callable, inputs, replicas: int = 1, given=None):
    """Result and gradients of a number of steps; `given` makes a gradient graph for the step."""

    def build(*tensors):
        ir = popxl.gir()
        body = ir.create_graph(step, *tensors)
        graph = ir.create_graph(lambda *args: form(body, *args), *tensors)
        site = ops.call_with_info(graph, *tensors)
        chosen = {} if given is None else {body: given(body)}
        info = autodiff(graph, called_graphs_grad_info=chosen)
        assert isinstance(info, GradGraphInfo)
        dy = popxl.constant(np.arange(12, dtype=np.float32).reshape(4, 3) / 12)
        return [site.outputs[0], *ops.call(info.graph, dy, inputs_dict=info.inputs_dict(site))]

    return run(build, *inputs, replicas=replicas)


STEPS = {
    "detached": lambda x, w: ops.detach(ops.sin(x)) * x @ w,
    "step function": lambda x, w: ops.sign(x) * x @ w + ops.floor(x),
    "branches": lambda x, w: ops.conditional(
        ops.greater(ops.sum(x), popxl.constant(0.0)),
        popxl.gir().create_graph(lambda a, b: ops.sin(a) @ b, x, w),
        popxl.gir().create_graph(lambda a: a * 0.5, x),
        [x, w],
        [x],
    )[0],
}


@pytest.mark.parametrize("name", STEPS)
def test_a_loop_has_the_gradient_of_its_unrolled_calls(name):
    looped, unrolled = (_gradients(STEPS[name], form, (X, W)) for form in (_looped, _unrolled))
    for a, b in zip(looped, unrolled, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_gradient_graph_that_is_given_is_used():
    """The gradient of a step is said to be its negative, which no derivative gives."""

    def negative(body):
        def grad(dy):
            return ops.negate(dy)

        info = autodiff(body)
        graph = body.ir.create_graph(grad, body.outputs[0])
        given = (c for c in info.expected_inputs if c.connection_type.name != "Fwd")
        info.graph, info.expected_inputs = graph, tuple(given)
        return info

    _, dx = _gradients(lambda x: ops.sin(x), _looped, (X,), given=negative)
    np.testing.assert_allclose(dx, -np.arange(12).reshape(4, 3) / 12, rtol=1e-6)


def test_an_input_that_only_later_iterations_pass_on():
    """The first carried value reaches the result through the second one."""

    def build(x, w):
        ir = popxl.gir()
        body = ir.create_graph(lambda a, b: (ops.sin(b), a * b), x, w)
        graph = ir.create_graph(lambda a, b: ops.repeat(body, 2, a, b)[0], x, w)
        site = ops.call_with_info(graph, x, w)
        info = autodiff(graph, grads_required=[graph.inputs[0]])
        dy = popxl.constant(np.ones((4, 3), np.float32))
        return list(ops.call(info.graph, dy, inputs_dict=info.inputs_dict(site)))

    w = f32(4, 3, seed=2)
    (dx,) = run(build, X, w)
    np.testing.assert_allclose(dx, np.cos(X * w) * w, rtol=1e-4, atol=1e-5)


def test_the_body_of_a_loop_gains_no_outputs():
    ir = popxl.Ir()
    with ir.main_graph:
        x = popxl.variable(X)
        body = ir.create_graph(lambda a: ops.exp(ops.sin(a)), x)
        graph = ir.create_graph(lambda a: ops.repeat(body, 2, a), x)
        autodiff(graph)
    assert len(body.outputs) == 1
