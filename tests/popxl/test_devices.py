"""Devices of a session: how many, of which platform, and what happens when more are needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import popxl
from popxl._devices.mesh import platform_of, replica_mesh

MORE_DEVICES = """
import numpy as np, popxl
from popxl import ops

def program(replicas):
    ir = popxl.Ir(replication=replicas)
    with ir.main_graph:
        v = popxl.variable(np.zeros(3, np.float32))
        c = popxl.constant(np.arange(3000, dtype=np.float32))
        ops.add_(v, ops.collectives.replicated_all_reduce(c[:3]))
    return ir, v

(small, v), (large, w) = program(2), program(80)
session = popxl.Session(small)
with session:
    session.run()
with popxl.Session(large) as other:
    other.run()
with session:  # the CPU backend was restarted: this compiles anew
    session.run()
print(v._data.tolist(), w._data.tolist())
"""


def test_more_replicas_than_the_backend_has_devices_restart_it():
    source = str(Path(popxl.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", MORE_DEVICES], capture_output=True, text=True, env=environment
    )
    assert done.stdout.strip() == "[0.0, 4.0, 8.0] [0.0, 80.0, 160.0]", done.stderr


def test_platforms():
    assert platform_of("cpu") == platform_of("ipu_model") == "cpu"
    assert platform_of("cuda") == platform_of("gpu") == "gpu"
    assert platform_of("tpu") == "tpu"
    with pytest.raises(ValueError, match="unknown device_desc 'ipu'"):
        platform_of("ipu")


def test_a_mesh_has_a_device_for_each_replica():
    assert replica_mesh("cpu", 3).devices.shape == (3,)
    assert len({d.id for d in replica_mesh("cpu", 8).devices.flat}) == 8


def test_absent_platforms_are_named_with_what_to_do():
    with pytest.raises(popxl.errors.DeviceError, match=r"needs 2 tpu .* device_desc='cpu'"):
        replica_mesh("tpu", 2)
