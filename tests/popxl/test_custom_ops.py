"""JAX functions as ops: wherever ops go."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.experimental import pallas as pl

import popxl
from popxl import ops
from popxl._analysis.verify import verify_ir
from popxl._compile.executable_cache import statistics
from popxl.custom import jax_op
from popxl.errors import SpecError
from popxl.transforms import autodiff
from tests.popxl.programs import f32, run

pytestmark = pytest.mark.usefixtures("compiled_quickly")

X, W = f32(4, 3), f32(3, 3, seed=1)
DY = np.arange(12, dtype=np.float32).reshape(4, 3) / 12


@jax_op
def project(x, w, *, scale=1.0):
    return jnp.einsum("ij,jk->ik", jnp.tanh(x), w) * scale


@jax.custom_vjp
def _clipped(x):
    return jnp.clip(x, -1, 1)


_clipped.defvjp(lambda x: (_clipped(x), None), lambda _, dy: (dy,))  # passes all gradients
straight_through = jax_op(name="straight_through")(_clipped)


def _square_kernel(x_ref, y_ref):
    y_ref[...] = x_ref[...] * x_ref[...]


@jax_op(grad=lambda inputs, outputs, dys: (2 * inputs[0] * dys[0],))
def square(x):
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(_square_kernel, out_shape=shape, interpret=True)(x)


@jax_op(inplace="total")
def accumulate_(total, x):
    return total + x * x


@jax_op
def extremes(*xs):
    return jnp.minimum(*xs), jnp.maximum(*xs)


@jax_op(no_grad="counts elements")
def above(x, *, limit):
    return jnp.sum(x > limit, dtype=jnp.float32) + 0 * x


def _value_and_gradients(fn, *inputs):
    def build(*tensors):
        graph = popxl.gir().create_graph(fn, *tensors)
        call = ops.call_with_info(graph, *tensors)
        info = autodiff(graph)
        dy = popxl.constant(DY)
        return [call.outputs[0], *ops.call(info.graph, dy, inputs_dict=info.inputs_dict(call))]

    return run(build, *inputs)


def _torch(fn, *inputs):
    tensors = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in inputs]
    y = fn(*tensors)
    y.backward(torch.tensor(DY, dtype=torch.float64))
    return [y.detach().numpy(), *(t.grad.numpy() for t in tensors)]


class _PassThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clamp(-1, 1)

    @staticmethod
    def backward(ctx, dy):
        return dy


FUNCTIONS = {
    "einsum": (
        lambda x, w: project(x, w, scale=0.5),
        lambda x, w: torch.tanh(x) @ w * 0.5,
        (X, W),
    ),
    "custom_vjp": (lambda x: straight_through(x * 2.0), lambda x: _PassThrough.apply(x * 2), (X,)),
    "pallas": (square, lambda x: x * x, (X,)),
    "no gradient": (
        lambda x: above(x, limit=0.0) * x,
        lambda x: (x > 0).sum().detach() * x,
        (X,),
    ),
    "in a loop": (
        lambda x, w: ops.repeat(
            popxl.gir().create_graph(lambda a, b: square(project(a, b)), x, w), 2, x, w
        )[0],
        lambda x, w: (torch.tanh((torch.tanh(x) @ w) ** 2) @ w) ** 2,
        (X, W),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_gradients(name):
    fn, reference, inputs = FUNCTIONS[name]
    found, expected = _value_and_gradients(fn, *inputs), _torch(reference, *inputs)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


def test_several_results_and_any_number_of_inputs():
    low, high = run(lambda a, b: extremes(a, b), X, DY)
    np.testing.assert_array_equal(low, np.minimum(X, DY))
    np.testing.assert_array_equal(high, np.maximum(X, DY))


def test_an_op_in_place_changes_a_variable():
    ir = popxl.Ir()
    with ir.main_graph:
        total = popxl.variable(np.ones(3, np.float32))
        accumulate_(total, total)
    verify_ir(ir)
    with popxl.Session(ir) as session:
        session.run()
        session.run()
    np.testing.assert_array_equal(session.get_tensor_data(total), [6, 6, 6])


def test_the_text_names_the_op_and_its_attributes():
    ir = popxl.Ir()
    with ir.main_graph:
        project(popxl.variable(X), popxl.variable(W), scale=0.25)
    assert re.search(r"test_custom_ops\.project\(.*scale=0.25", str(ir.main_graph))


def test_attributes_of_equal_value_but_other_type_give_other_dtypes():
    @jax_op
    def times(x, *, factor):
        return x * factor

    ir = popxl.Ir()
    with ir.main_graph:
        x = popxl.variable(np.arange(3, dtype=np.int32))
        assert times(x, factor=1).dtype == popxl.int32
        assert times(x, factor=1.0).dtype == popxl.float32


def test_an_op_may_be_defined_again():
    made = []
    for value in (1.0, 2.0):

        @jax_op(name="again_in_test")
        def shift(x, *, by=value):
            return x + by

        made.append(shift)
    first, second = run(lambda x: [op(x) for op in made], X)
    np.testing.assert_allclose(second - first, 1, rtol=1e-5)


def _differentiated_loop():
    ir = popxl.Ir()
    with ir.main_graph:
        x, w = popxl.variable(X, name="x"), popxl.variable(W, name="w")
        step = ir.create_graph(lambda a, b: project(a, b, scale=0.5), x, w)
        graph = ir.create_graph(lambda a, b: ops.repeat(step, 2, a, b), x, w)
        call = ops.call_with_info(graph, x, w)
        info = autodiff(graph)
        dx, _ = ops.call(info.graph, popxl.constant(DY), inputs_dict=info.inputs_dict(call))
        ops.var_updates.copy_var_update_(x, dx)
    return ir, x


def test_a_differentiated_loop_with_the_op_is_cached(tmp_path, monkeypatch):
    monkeypatch.setenv("POPXL_CACHE_DIR", str(tmp_path))
    results = []
    for hits in (0, 1):
        before = statistics.hits
        ir, x = _differentiated_loop()
        with popxl.Session(ir) as session:
            session.run()
        assert statistics.hits - before == hits
        results.append(session.get_tensor_data(x))
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        (lambda x: project(x, 2.0), TypeError, "parameter 'w' takes a tensor, but got 2.0"),
        (lambda x: project(x), TypeError, "project: missing a required argument: 'w'"),
        (lambda x: project(x, x, scale=x), TypeError, "attribute 'scale' got a tensor"),
        (lambda x: project(x, x, scale=[1]), TypeError, "attribute 'scale' must be hashable"),
        (lambda x: project(x, x), SpecError, r"project\(.*test_custom_ops.py"),
        (lambda x: jax_op(inplace="z")(lambda y: y), ValueError, "no positional parameter 'z'"),
        (lambda x: jax_op(grad=lambda *_: None, no_grad="none"), ValueError, "not both"),
    ],
)  # fmt: skip
def test_errors_name_the_op_and_the_parameter(use, error, message):
    with popxl.Ir().main_graph:
        x = popxl.variable(X)
        with pytest.raises(error, match=message):
            use(x)
