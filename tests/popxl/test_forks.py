"""A fork of a process with devices ends, says what is wrong, and leaves files alone."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os, sys, warnings
import numpy as np
import popxl
from popxl.errors import popart_exception
from tests.popxl.on_disk import ROWS, program

warnings.simplefilter("ignore")  # JAX warns of forks
folder, kept = sys.argv[1:]
ir, rows = program(ROWS - 1)
with ir.main_graph:
    data = np.memmap(kept, np.float32, "w+", shape=(3,))
    popxl.ops.add_(popxl.variable(data), popxl.constant(1.0))
session = popxl.Session(ir, disk=folder)
with session:
    session.run()
    if os.fork() == 0:
        for use in (session.run, session.weights_to_host, lambda: popxl.Session(ir),
                    lambda: session.read_variable_data(rows[-1])):
            try:
                use()
            except popart_exception as error:
                assert "forked from one that has devices" in str(error), error
            else:
                raise AssertionError(use)
        sys.exit(7)  # leaves the session
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
    assert np.fromfile(kept, np.float32).tolist() == [0, 0, 0]
    session.run()
    found = [session.read_variable_data(v) for v in rows]
reference, rows = program(0)
with popxl.Session(reference) as session:
    session.run(), session.run()
    for a, v in zip(found, rows, strict=True):
        np.testing.assert_array_equal(a, session.read_variable_data(v))
assert np.fromfile(kept, np.float32).tolist() == [2, 2, 2]
assert not os.listdir(folder)
"""


def test_a_fork_ends_and_leaves_everything_alone(tmp_path):
    folder = tmp_path / "disk"
    command = [sys.executable, "-c", PROGRAM, str(folder), str(tmp_path / "map")]
    subprocess.run(command, check=True, timeout=60)
