"""Gradients of random programs against `jax.grad` of the same programs in JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import popxl
from popxl import ops
from popxl.transforms import autodiff
from tests.conftest import compile_quickly
from tests.popxl.programs import store
from tests.properties.language import Body, bodies
from tests.properties.meanings import run_jax, write_popxl
from tests.properties.settings import FAST, SLOW, inputs_of

REFERENCE = {"xla_backend_optimization_level": 0}  # it runs once: what takes time is to compile it


def check(programs: list[Body]) -> None:
    """Gradients of the sum of all tensors of a program, each weighted by its number."""
    data = [inputs_of(body, seed) for seed, body in enumerate(programs)]
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        streams = [
            [store(t) for t in gradients(body, inputs)]
            for body, inputs in zip(programs, data, strict=True)
        ]
    with popxl.Session(ir) as session:
        outputs = session.run()

    for found, expected in zip(streams, jax_gradients(programs, data), strict=True):
        for i, (stream, grad) in enumerate(zip(found, expected, strict=True)):
            scale = max(1.0, np.abs(grad).max())
            np.testing.assert_allclose(
                outputs[stream] / scale, grad / scale, rtol=1e-3, atol=1e-4, err_msg=f"input {i}"
            )


def jax_gradients(programs: list[Body], data: list[list[np.ndarray]]) -> list[list[jax.Array]]:
    """Gradients of each program, in one compiled function."""

    def total(inputs: list[list[jax.Array]]) -> jax.Array:
        return sum(objective(b, xs) for b, xs in zip(programs, inputs, strict=True))

    return jax.jit(jax.grad(total), compiler_options=REFERENCE)(data)


def weight(i: int) -> float:
    return 1 / (1 + i)


def objective(body: Body, inputs: list[jax.Array]) -> jax.Array:
    return sum(weight(i) * jnp.sum(y) for i, y in enumerate(run_jax(body, inputs)))


def gradients(body: Body, inputs: list[np.ndarray]) -> tuple[popxl.Tensor, ...]:
    def forward() -> list[popxl.Tensor]:
        return write_popxl(body, [popxl.graph_input(x.shape, popxl.float32) for x in inputs])

    graph = popxl.gir().create_graph(forward)
    provided = graph.outputs
    seeds = [np.full(t.shape, weight(i), np.float32) for i, t in enumerate(provided)]
    info = autodiff(graph, grads_provided=provided, grads_required=graph.inputs)
    call = ops.call_with_info(graph, *(popxl.variable(x) for x in inputs))
    return ops.call(info.graph, *map(popxl.constant, seeds), inputs_dict=info.inputs_dict(call))


PROGRAMS = st.lists(bodies(steps=8, smooth=True), min_size=3, max_size=3)


@FAST
@given(PROGRAMS)
def test_gradients_of_random_programs(programs: list[Body]) -> None:
    compile_quickly(True)
    check(programs)


@pytest.mark.slow
@SLOW
@given(PROGRAMS)
def test_gradients_of_many_random_programs(programs: list[Body]) -> None:
    check(programs)
