"""Products of half types on GPUs: rounded as they are written, with no kernel that converts."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from popxl import dtypes
from popxl._ir.op_registry import registry
from popxl.ops._reductions import tracing_platform
from tests.popxl.h100 import compiled_for_an_h100, needs_the_compiler

SCRIPT = """
import re
from tests.popxl.test_gpu_products import lowered

hlo = compiled(lowered("gpu 9.0"))
print(re.findall(r"__cublas[$\\w]*", hlo)[0], hlo.count("convert("), sep=";")
"""


def lowered(target: str, dtype: Any = jnp.bfloat16, **attrs: Any) -> jax.stages.Lowered:
    """The product of (4, 128, 512) and (512, 256)."""
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape in ((4, 128, 512), (512, 256))]
    lower = registry()["matmul"].lower
    assert lower is not None
    with tracing_platform(target):
        traced = jax.jit(lambda a, b: lower(a, b, **attrs)).trace(*shapes)
    return traced.lower(lowering_platforms=("cpu" if target == "cpu" else "cuda",))


@pytest.mark.parametrize(
    ("target", "dtype", "attrs", "product"),
    [
        ("gpu 9.0", jnp.bfloat16, {}, "bf16"),
        ("gpu", jnp.float16, {}, "f16"),
        ("gpu", jnp.bfloat16, {"output_type": dtypes.float32}, "f32"),
        ("gpu", jnp.bfloat16, {"output_type": dtypes.float16}, "f32"),
        ("gpu", jnp.float32, {}, "f32"),
        ("cpu", jnp.bfloat16, {}, "f32"),
    ],
)
def test_sums_are_float32_and_a_gpu_rounds_them_as_it_writes(target, dtype, attrs, product):
    text = lowered(target, dtype, **attrs).as_text()
    (result,) = re.findall(r"stablehlo\.dot_general.*-> tensor<[\dx]*x(\w+)>", text)
    assert result == product


@pytest.mark.slow
@needs_the_compiler
def test_nothing_converts_a_product_for_an_h100():
    (line,) = compiled_for_an_h100(SCRIPT)
    assert line == ["__cublas$lt$matmul", "0"]
