"""XLA's reduce-scatter between processes on CPU loses the end of large messages; ours does not.

As in tests/popxl/test_xla_faults.py: if the second test fails after an upgrade of jaxlib, the fault
is gone, and `reduce_scatter` can be XLA's everywhere.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import popdist
import popxl
from popxl import ops
from tests.children import PYTHON_PATH
from tests.popxl.compiled import optimised

ROOT = Path(__file__).parents[2]
PROGRAM = str(Path(__file__).with_name("reduce_scatter.py"))


def wrong_results(how: str) -> int:
    """How many of 1,600 results differ from the exact sum."""
    run = subprocess.run(
        [sys.executable, "-m", "popdist.run", "--processes", "2", "--",
         sys.executable, PROGRAM, how, "200"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": PYTHON_PATH},
        capture_output=True, text=True, timeout=500, check=True,
    )  # fmt: skip
    first, second = map(int, run.stdout.split())
    assert first == second
    return first


@pytest.mark.slow
def test_sums_are_exact():
    assert wrong_results("ours") == 0


@pytest.mark.slow
def test_xlas_are_not():
    assert wrong_results("xla") > 0


@pytest.mark.parametrize(("instances", "uses"), [(1, "reduce-scatter("), (2, "all-to-all(")])
def test_programs_of_several_processes_use_ours(instances, uses, monkeypatch):
    ir = popxl.Ir(replication=2)
    with ir.main_graph:
        given = popxl.h2d_stream((6,), popxl.float32)
        out = popxl.d2h_stream((3,), popxl.float32)
        ops.host_store(out, ops.collectives.replicated_reduce_scatter(ops.host_load(given)))
    x = np.random.default_rng(0).normal(size=(2, 6)).astype(np.float32)
    with monkeypatch.context() as several:
        several.setattr(popdist, "getNumInstances", lambda: instances)
        session = popxl.Session(ir, "cpu")
    with session:
        found = {w for w in ("reduce-scatter(", "all-to-all(") if w in optimised(session)}
        result = session.run({given: x})[out]
    assert found == {uses}
    np.testing.assert_allclose(result, x.sum(0).reshape(2, 3), rtol=1e-6)
