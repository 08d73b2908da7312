"""Products of float32 are asked for in float32: GPUs would round their operands to TF32."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
import pytest

import popxl
from popxl import ops
from popxl._compile.segment_function import replica_function
from popxl._schedule.schedule_builder import build_schedule
from popxl._schedule.segment import argument_specs
from popxl.ops._reductions import tracing_platform
from popxl.plan.plan import make_program_context

PRODUCTS: dict[str, Callable[[popxl.Tensor, popxl.Tensor], popxl.Tensor]] = {
    "matmul": lambda a, b: a @ b,
    "conv": lambda a, b: ops.conv(a.reshape((1, 4, 2, 2)), b.reshape((4, 4, 1, 1))),
    "attention": lambda a, b: ops.attention(*(t.reshape((1, 1, 4, 4)) for t in (a, b, b))),
    "interpolate": lambda a, _: ops.interpolate(
        a.reshape((1, 1, 4, 4)), (1.0, 1.0, 2.0, 2.0), "linear"
    ),
}


def products(name: str, dtype: popxl.dtype, target: str) -> list[str]:
    """How precise the products are, with their gradients."""
    ir = popxl.Ir()
    with ir.main_graph:
        a, b = (popxl.variable(np.ones((4, 4), np.float32), dtype) for _ in range(2))
        graph = ir.create_graph(lambda a, b: ops.sum(PRODUCTS[name](a, b)), a, b)
        grads = popxl.transforms.autodiff(graph)
        info = ops.call_with_info(graph, a, b)
        one = popxl.constant(np.ones((), np.float32), dtype)
        given = grads.inputs_dict(info)
        for grad in ops.call(grads.graph, one, inputs_dict=given):
            ops.host_store(popxl.d2h_stream(grad.shape, grad.dtype), grad)
    schedule = build_schedule(ir)
    found: list[str] = []
    for segment in schedule.segments:
        segment.context = make_program_context(schedule, ir, target)
        specs = [
            jax.ShapeDtypeStruct(s.shape, s.dtype.as_jax()) for s, _ in argument_specs(segment)
        ]
        with tracing_platform(target):
            text = str(jax.make_jaxpr(replica_function(segment), axis_env=[("r", 1)])(*specs))
        made = text.count("dot_general[") + text.count("conv_general_dilated[")
        exact = text.count("precision=(Precision.HIGHEST") + text.count("precision=HIGHEST")
        found += ["exact"] * exact + ["JAX's"] * (made - exact)
    return found


@pytest.mark.parametrize("name", PRODUCTS)
def test_float32_is_multiplied_as_it_is(name: str) -> None:
    found = products(name, popxl.float32, "gpu 9.0")
    assert found
    assert set(found) == {"exact"}


def test_halves_are_multiplied_as_the_device_does_it_best() -> None:
    assert set(products("matmul", popxl.bfloat16, "gpu 9.0")) == {"JAX's"}


def test_whoever_chose_a_precision_gets_it() -> None:
    with jax.default_matmul_precision("tensorfloat32"):
        assert set(products("matmul", popxl.float32, "gpu 9.0")) == {"JAX's"}
