"""Temporaries on a GPU: as estimated, and as XLA places them for an H100 that is not there."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from popxl.plan.flat_jaxpr import flatten_jaxpr
from popxl.plan.memory_estimate import LivenessModel
from tests.popxl.h100 import compiled_for_an_h100, needs_the_compiler

ROWS, HIDDEN, VOCABULARY = 2048, 2048, 8192
LOGITS = ROWS * VOCABULARY * 2
"""Bytes of (rows, vocabulary) in bfloat16."""
WORKSPACE = 2**22
"""Bytes that XLA gives cublasLt, which no plan counts."""

SCRIPT = """
from tests.popxl.test_gpu_memory import CASES, lowered

for name in CASES:
    memory = executable(lowered(name)).get_compiled_memory_stats()
    print(name, memory.temp_size_in_bytes, sep=";")
"""


def gradients(x: Any, w: Any) -> tuple[Any, Any]:
    """Of the features and, in float32, of a head's weight."""
    exp = jnp.exp(x @ w)
    of_logits = exp / exp.sum(1, keepdims=True)
    return of_logits @ w.T, jnp.dot(x.T, of_logits, preferred_element_type=jnp.float32)


def over_a_product(x: Any, w: Any, _: Any) -> Any:
    return gradients(x, w)[0]


def in_a_later_result(x: Any, w: Any, _: Any) -> Any:
    return gradients(x, w)


def in_a_donated_argument(x: Any, w: Any, total: Any) -> Any:
    of_x, of_w = gradients(x, w)
    return of_x, total + of_w


CASES: dict[str, tuple[Any, int]] = {
    f.__name__: (f, expected)
    for f, expected in (
        (over_a_product, 2 * LOGITS),
        (in_a_later_result, LOGITS),
        (in_a_donated_argument, 2 * LOGITS),
    )
}


def traced(name: str) -> jax.stages.Traced:
    x, w = (ROWS, HIDDEN), (HIDDEN, VOCABULARY)
    specs = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in ((x, jnp.bfloat16), (w, jnp.bfloat16), (w, jnp.float32))
    ]
    donated = 2 if "donated" in name else ()
    return jax.jit(CASES[name][0], donate_argnums=donated, keep_unused=True).trace(*specs)


def lowered(name: str) -> jax.stages.Lowered:
    return traced(name).lower(lowering_platforms=("cuda",))


def estimated(name: str) -> int:
    flat = flatten_jaxpr(traced(name).jaxpr.jaxpr)
    donated = flat.inputs[2:] if "donated" in name else []
    return LivenessModel(flat, "gpu 9.0", donated).peak_bytes()


@pytest.mark.parametrize("name", CASES)
def test_values_share_memory(name: str) -> None:
    """The gradient is not written over the logits, as a product is a part of a tuple; those are in
    the memory of the weight's gradient before that is made, unless it is an argument's."""
    assert estimated(name) == pytest.approx(CASES[name][1], rel=0.02)


@pytest.mark.slow
@needs_the_compiler
def test_xla_places_values_as_estimated() -> None:
    taken = {name: int(count) for name, count in compiled_for_an_h100(SCRIPT)}
    assert taken == pytest.approx(
        {name: estimated(name) + WORKSPACE for name in CASES}, abs=WORKSPACE
    )
