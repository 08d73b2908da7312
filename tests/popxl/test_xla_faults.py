"""Faults of XLA that give wrong results or crash, and the switches that answer them.

Each fault has a test that our switch makes the result right, and one that without the switch it is
still wrong. If one of the second kind fails after an upgrade of jaxlib, the fault is gone: remove
the switch, and both tests. A fault that shows only now and then gets several tries, and is marked
slow.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import popxl
from popxl import ops
from popxl._devices import cpu
from popxl.ops import _strided_regions
from tests.popxl.compiled import optimised
from tests.popxl.programs import run

YNN = "xla_cpu_experimental_ynn_fusion_type"
right_since_0_11 = pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="the fault is gone")


# ---- A: CPU, YNNPACK fusions (jax#39103, #40412) ------------------------------------------------
def _squares_of_rows() -> tuple[popxl.Ir, popxl.DeviceToHostStream, np.ndarray]:
    """Squared norms of [i, 0, 0] times the identity: one element comes out wrong."""
    numbers = np.arange(32769, dtype=np.float32)
    rows = np.stack((numbers, 0 * numbers, 0 * numbers), axis=1)
    ir = popxl.Ir()
    with ir.main_graph:
        x, identity = popxl.variable(rows), popxl.variable(np.eye(3, dtype=np.float32))
        product = ops.matmul(identity, ops.transpose(x))
        norms = ops.sum(product * product, axis=0)
        out = popxl.d2h_stream(norms.shape, norms.dtype)
        ops.host_store(out, norms)
    return ir, out, numbers**2


def test_matrix_products_with_reductions_are_right():
    ir, out, expected = _squares_of_rows()
    with popxl.Session(ir) as session:
        np.testing.assert_allclose(session.run()[out], expected, rtol=1e-6)


def _without_ynn_switch(monkeypatch) -> None:
    monkeypatch.delitem(cpu.COMPILER_OPTIONS, YNN)
    monkeypatch.setattr(cpu, "_FLOAT32_PRODUCT", re.compile("none"))


@right_since_0_11
def test_matrix_products_with_reductions_are_wrong_without_the_switch(monkeypatch):
    _without_ynn_switch(monkeypatch)
    ir, out, expected = _squares_of_rows()
    session = popxl.Session(ir)
    if "__ynn" not in optimised(session):
        pytest.skip("XLA makes no YNNPACK fusions for this CPU")
    with session:
        wrong = ~np.isclose(session.run()[out], expected, rtol=1e-6)
    assert wrong.any()


RANK_7 = """
import sys, jax, jax.numpy as jnp, numpy as np
from popxl._compile import xla_compile as c
from popxl._devices import cpu
if sys.argv[1] == "off":
    del cpu.COMPILER_OPTIONS["xla_cpu_experimental_ynn_fusion_type"]
shape = (3, 1, 2, 2, 8, 8, 8)
a, b = (np.random.default_rng(i).normal(size=shape).astype(np.float32) for i in range(2))
lowered = jax.jit(lambda a, b: jnp.sum(a * b, axis=3)).lower(a, b)
compiled = c.compile_lowered(lowered, "cpu")
print("ynn" if "__ynn" in compiled.as_text() else "no ynn", flush=True)
np.testing.assert_allclose(compiled(a, b), (a * b).sum(3), rtol=1e-5, atol=1e-6)
print("right")
"""


def _run_rank_7(switch: str, seconds: int) -> tuple[int | None, str]:
    """Exit status (None: it hung) and output of a reduction over an array of rank 7."""
    source = Path(popxl.__file__).parents[1]
    command = [sys.executable, "-c", RANK_7, switch]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, env=_environment(source)
        )
    except subprocess.TimeoutExpired as hung:
        return None, (hung.stdout or b"").decode()
    return done.returncode, done.stdout


def _environment(source: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(source), "JAX_PLATFORMS": "cpu"}


def test_reductions_of_rank_7_are_right():
    status, output = _run_rank_7("on", seconds=300)
    assert status == 0
    assert output.endswith("right\n")


@pytest.mark.slow  # says only whether an upgrade of jaxlib has ended the fault
@right_since_0_11
def test_reductions_of_rank_7_crash_or_hang_without_the_switch():
    status, output = _run_rank_7("off", seconds=30)
    if "no ynn" in output:
        pytest.skip("XLA makes no YNNPACK fusions for this CPU")
    assert status != 0


# ---- B: CPU, an update with a shifted part of itself, beside a reshape (openxla/xla#49176) ------
def _shift_by_one(x):
    base = x + popxl.constant(1, popxl.int32)
    ops.var_updates.copy_var_update_(ops.slice_(base, 1, 4), ops.slice(base, 0, 3))
    return ops.reshape(base, (1, 4, 1))


SHIFTED_IN, SHIFTED_OUT = np.arange(4, dtype=np.int32).reshape(4, 1, 1), [1, 1, 2, 3]


def test_a_write_through_a_view_then_a_reshape_is_right():
    (result,) = run(_shift_by_one, SHIFTED_IN)
    assert result.ravel().tolist() == SHIFTED_OUT


def test_a_write_through_a_view_then_a_reshape_is_wrong_if_it_is_fused(monkeypatch):
    monkeypatch.setattr(_strided_regions, "unfused_update", lambda update: update)
    (result,) = run(_shift_by_one, SHIFTED_IN)
    assert result.ravel().tolist() != SHIFTED_OUT


def test_dynamic_updates_then_a_reshape_are_right():
    def build(x):
        base = x + popxl.constant(1, popxl.int32)
        at = popxl.constant([1], popxl.uint32)
        shifted = ops.dynamic_update(base, at, ops.slice(base, 0, 3), [0], [3], False)
        return ops.reshape(shifted, (1, 4, 1))

    (result,) = run(build, SHIFTED_IN)
    assert result.ravel().tolist() == SHIFTED_OUT


# ---- C: CPU, no thread left to start the replica that all others wait for ----------------------
MANY_SEGMENTS = """
import sys, numpy as np, popxl
from popxl import ops
from popxl._devices import cpu
if sys.argv[1] == "off":
    cpu._UNFINISHED = 10**9
ir, count = popxl.Ir(replication=2), 400
with ir.main_graph:
    buffer = popxl.remote_buffer((64, 64), popxl.float32, count)
    x, first = popxl.variable(np.eye(64, dtype=np.float32)), popxl.constant(0, popxl.int32)
    def step(x, row):
        y = ops.tanh(ops.tanh(ops.remote_load(buffer, row) @ x) @ x)
        ops.remote_store(buffer, row, ops.collectives.replicated_all_reduce(y))
        return x * 0.99, row + 1
    ops.repeat(ir.create_graph(step, x, first), count, x, first)
with popxl.Session(ir, "cpu") as session:
    for _ in range(5):
        session.run()
print("done")
"""


def _run_many_segments(bound: str) -> int:
    source = Path(popxl.__file__).parents[1]
    flags = "--xla_force_host_platform_device_count=2"  # and two threads
    if bound == "off":
        flags += " --xla_cpu_collective_call_terminate_timeout_seconds=4"
    return subprocess.run(
        [sys.executable, "-c", MANY_SEGMENTS, bound],
        capture_output=True, timeout=300, check=False,
        env=_environment(source) | {"XLA_FLAGS": flags},
    ).returncode  # fmt: skip


def test_many_segments_with_collectives_end():
    assert _run_many_segments("on") == 0


@pytest.mark.slow  # each try takes seconds, and on a busy machine some run through
def test_many_segments_with_collectives_stand_still_without_the_bound():
    if (os.cpu_count() or 1) > 2:
        pytest.skip("XLA has a thread for each processor")
    assert any(_run_many_segments("off") != 0 for _ in range(10))


# ---- D: a whole number over a constant zero ------------------------------------------------------
OVER_ZERO = """
import sys, jax, jax.numpy as jnp
jax.jit(lambda: getattr(jax.lax, sys.argv[1])(jnp.int32(5), jnp.int32(0)))()
"""


@pytest.mark.slow  # says only whether an upgrade of jaxlib has ended the fault
@right_since_0_11
@pytest.mark.parametrize("op", ["div", "rem"])
def test_a_whole_number_over_a_constant_zero_kills_a_process_of_jax(op):
    """Ours give what devices give: see the divisions of extremes in `test_host_arithmetic.py`."""
    command = [sys.executable, "-c", OVER_ZERO, op]
    done = subprocess.run(command, capture_output=True, timeout=300, env=_environment(Path()))
    assert done.returncode < 0


# ---- E: replicas' functions that take or return arrays of no elements ----------------------------
NO_ELEMENTS = """
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
jax.config.update("jax_num_cpu_devices", 2)
mesh = jax.make_mesh((2,), ("r",), axis_types=(jax.sharding.AxisType.Auto,))
add = jax.shard_map(lambda x, y: (x + 1, y + 1), mesh=mesh, in_specs=P("r"), out_specs=P("r"))
jax.jit(add).lower(np.zeros((0, 3), np.float32), np.zeros(2, np.float32)).compile()
"""


@pytest.mark.slow  # says only whether an upgrade of jaxlib has ended the fault
@pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="this one compiles it")
def test_an_array_of_no_elements_kills_a_process_of_jax():
    """Ours stay outside of the replicas' function: `test_no_elements.py` runs programs of them."""
    command = [sys.executable, "-c", NO_ELEMENTS]
    done = subprocess.run(command, capture_output=True, timeout=300, env=_environment(Path()))
    assert done.returncode < 0


# ---- entries at another index than the loop counter (openxla/xla#46231 in one executable) -------
ROWS, WIDTH = 16, 1024


def _rows_from_the_end() -> tuple[popxl.Ir, popxl.DeviceToHostStream]:
    """total = sin(total) + entry ROWS-1-i of a remote buffer, for each i."""
    ir = popxl.Ir()
    with ir.main_graph:
        buffer = popxl.remote_buffer((WIDTH,), popxl.float32, ROWS)
        for row in range(ROWS):
            popxl.remote_variable(np.full(WIDTH, row, np.float32), buffer, row)
        total = ops.init((WIDTH,), popxl.float32)
        last = popxl.constant(ROWS - 1, popxl.int32)

        def step(total, row):
            return ops.sin(total) + ops.remote_load(buffer, row), row - 1

        total, _ = ops.repeat(ir.create_graph(step, total, last), ROWS, total, last)
        out = popxl.d2h_stream((WIDTH,), popxl.float32)
        ops.host_store(out, total)
    return ir, out


def _expected_total() -> np.ndarray:
    total = np.zeros(WIDTH)
    for row in reversed(range(ROWS)):
        total = np.sin(total) + row
    return total


@pytest.mark.parametrize("device", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_rows_from_the_end_are_the_right_ones(device):
    ir, out = _rows_from_the_end()
    with popxl.Session(ir, device) as session:
        np.testing.assert_allclose(session.run()[out], _expected_total(), rtol=1e-4)
