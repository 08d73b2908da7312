"""Device properties that programs can query."""

from __future__ import annotations

import jax
import pytest

import popxl
from popxl import hardware
from popxl._compile.platforms import get_platform


def test_each_replica_has_a_device_of_a_kind():
    assert hardware.device_kinds("cpu", 3) == ["cpu"] * 3
    assert hardware.peak_device_bytes("cpu", 1) is None


def test_too_few_devices_are_an_error():
    with pytest.raises(popxl.errors.DeviceError):
        hardware.device_kinds("tpu", 2)


def test_a_profile_is_written(tmp_path):
    ir = popxl.Ir()
    with ir.main_graph:
        out = popxl.d2h_stream((2,), popxl.float32)
        popxl.ops.host_store(out, popxl.variable([1.0, 2.0]) * 2.0)
    with popxl.Session(ir, "cpu") as session, hardware.profile_trace(tmp_path):
        session.run()
    assert list(tmp_path.rglob("*.xplane.pb"))


@pytest.mark.parametrize("given", ["", "--xla_gpu_enable_command_buffer=FUSION"])
def test_no_cuda_graphs_unless_they_are_asked_for(given: str, monkeypatch: pytest.MonkeyPatch):
    """XLA would record CUDA graphs again for the addresses of each call."""
    monkeypatch.setenv("XLA_FLAGS", given)
    lowered = jax.jit(lambda x: x).lower(1.0)
    options = get_platform("gpu").compiler_options_for(lowered)
    assert options.get("xla_gpu_enable_command_buffer") == (None if given else "")
