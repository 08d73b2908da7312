"""How many virtual CPU devices there are, and what growing their number leaves untouched."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np

import popxl
from popxl import ops

COUNTING = """
import jax, popxl, sys
for replicas in map(int, sys.argv[1:]):
    popxl.Session(popxl.Ir(replication=replicas))
    print(len(jax.devices("cpu")))
"""


def _devices_made(*replicas: int) -> list[int]:
    """Virtual devices after each of several sessions of a fresh process."""
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    command = [sys.executable, "-c", COUNTING, *map(str, replicas)]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return list(map(int, done.stdout.split()))


def test_no_more_devices_than_processors_or_replicas():
    """Each device is a thread that large products are cut for."""
    processors = len(os.sched_getaffinity(0))
    one, many, few = _devices_made(1, 200, 2)
    assert one == min(processors, 64)
    assert many == few == 200


def _accumulating(replicas: int) -> tuple[popxl.Ir, popxl.HostToDeviceStream, popxl.Variable]:
    ir = popxl.Ir(replication=replicas)
    with ir.main_graph:
        stream = popxl.h2d_stream((2,), popxl.float32)
        buffer = popxl.remote_buffer((2,), popxl.float32)
        total = popxl.remote_variable(np.zeros(2, np.float32), buffer)
        value = ops.remote_load(buffer, 0) + ops.host_load(stream)
        ops.remote_store(buffer, 0, value)
    return ir, stream, total


def test_a_session_runs_on_when_another_needs_more_devices():
    """More devices mean a new backend; what an attached session holds stays where it is."""
    import jax

    ir, stream, total = _accumulating(1)
    one = np.ones(2, np.float32)
    with popxl.Session(ir) as session:
        session.run({stream: one})
        replicas = len(jax.devices("cpu")) + 1
        wide_ir, wide_stream, wide_total = _accumulating(replicas)
        with popxl.Session(wide_ir) as wide:
            session.run({stream: one})
            wide.run({wide_stream: np.ones((replicas, 2), np.float32)})
            np.testing.assert_array_equal(wide.get_tensor_data(wide_total), one)
        session.run({stream: one})
        np.testing.assert_array_equal(session.get_tensor_data(total), 3 * one)
    with session:  # compiled anew for the new backend
        session.run({stream: one})
    np.testing.assert_array_equal(session.get_tensor_data(total), 4 * one)
