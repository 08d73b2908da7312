"""Devices of a session: how many, of which platform, and what happens when more are needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import popdist
import popxl
from planning.hardware.machines import machine
from popxl._devices import mesh
from popxl._devices.mesh import platform_of, prepare_environment, replica_mesh

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


@pytest.mark.parametrize(
    "given", [None, "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"]
)
def test_xla_takes_as_much_of_a_gpu_as_plans_count_on(given, monkeypatch):
    """By default JAX gives a program three quarters. It refuses both names at once."""
    names = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
    for name in names:
        monkeypatch.delenv(name, raising=False)
    if given is not None:
        monkeypatch.setenv(given, "0.5")
    prepare_environment()
    found = {name: os.environ[name] for name in names if name in os.environ}
    planned = machine("h100").usable_bytes / machine("h100").memory
    assert found == ({given: "0.5"} if given else {names[0]: f"{planned:g}"})
    assert planned > 0.9


@pytest.mark.parametrize(
    ("free", "neighbours", "limit"), [(128, 1, 121), (1000, 8, 118), (1, 4, 1)]
)
def test_pinned_memory_leaves_the_host_some(free, neighbours, limit, monkeypatch):
    """The pool of it doubles, up to this, and gives nothing back."""
    name = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
    monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(mesh, "free_host_bytes", lambda: free * 2**30)
    monkeypatch.setattr(popdist, "local_process_count", lambda: neighbours)
    prepare_environment()
    assert os.environ[name] == str(limit)
    monkeypatch.setenv(name, "7")
    prepare_environment()
    assert os.environ[name] == "7"
