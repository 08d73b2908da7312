"""Sums in a set order, and values of their type: what our switches do for an NVIDIA GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from tests.popxl.h100 import compiled_for_an_h100, needs_the_compiler

SCATTER = """
from tests.popxl.test_gpu_determinism import rows_added

for other in ({}, {"xla_gpu_exclude_nondeterministic_ops": False}):
    hlo = compiled(rows_added(), **other)
    scatter = next(line for line in hlo.splitlines() if " scatter(" in line)
    print("unique_indices=true" in scatter)
"""

ROUNDED = """
from tests.popxl.test_gpu_determinism import rounded

for other in ({}, {"xla_allow_excess_precision": True}):
    print("bf16[" in compiled(rounded(), **other).split("ENTRY")[0])
"""

POOLING = """
import jax
from popxl._compile.xla_compile import compile_lowered
from tests.popxl.test_gpu_determinism import pooling_gradient

mesh = jax.sharding.Mesh(np.array(devices), ("r",))
sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
print("scatter" in compile_lowered(pooling_gradient(sharding), "gpu").as_text())
"""


def rows_added() -> jax.stages.Lowered:
    """The gradient of an embedding: rows are added to a table, several of them to the same row."""
    specs = [jax.ShapeDtypeStruct((512, 64), jnp.float32), jax.ShapeDtypeStruct((256,), jnp.int32)]
    rows = jax.ShapeDtypeStruct((256, 64), jnp.float32)
    function = jax.jit(lambda table, at, rows: table.at[at].add(rows))
    return function.trace(*specs, rows).lower(lowering_platforms=("cuda",))


def rounded() -> jax.stages.Lowered:
    """Numbers between two ops that XLA fuses, in bfloat16."""
    x = jax.ShapeDtypeStruct((512,), jnp.float32)
    function = jax.jit(lambda x: (x * 3).astype(jnp.bfloat16).astype(jnp.float32) + 1)
    return function.trace(x).lower(lowering_platforms=("cuda",))


def pooling_gradient(sharding: jax.sharding.Sharding) -> jax.stages.Lowered:
    """The gradient of max pooling, for which XLA has no deterministic code."""
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=sharding)

    def pooled(x: jax.Array) -> jax.Array:
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (2, 2), (2, 2), "VALID").sum()

    return jax.jit(jax.grad(pooled)).trace(x).lower(lowering_platforms=("cuda",))


@pytest.mark.slow
@needs_the_compiler
def test_rows_are_added_in_a_set_order():
    """Atomic additions arrive in any order. The deterministic form sorts and sums first, so that
    each row is written once; without the switch it is not."""
    assert compiled_for_an_h100(SCATTER) == [["True"], ["False"]]


@pytest.mark.slow
@needs_the_compiler
def test_values_between_fused_ops_are_rounded_to_their_type():
    """Without the rounding, a recomputed layer in other fusions would have other values."""
    assert compiled_for_an_h100(ROUNDED) == [["True"], ["False"]]


@pytest.mark.slow
@needs_the_compiler
def test_what_has_no_set_order_compiles_all_the_same():
    assert compiled_for_an_h100(POOLING) == [["True"]]
