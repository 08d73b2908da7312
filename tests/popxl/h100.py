"""Compiling for an H100 that is not there.

It takes the packages jax-cuda12-plugin and jax-cuda12-pjrt, or jax-cuda13-plugin and
jax-cuda13-pjrt, in the version of jax; no CUDA toolkit.
`h100.txtpb` is the device, from `xla/backends/gpu/target_config/specs` in openxla/xla.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

DEVICES = """
import os
import sys
import numpy as np
from jax.experimental import topologies
from jax._src import compiler
from jax._src.cudnn import fused_attention_stablehlo
from jax._src.lib import _jax
from popxl._compile.platforms import Gpu
from tests.popxl.h100 import ROOT

target = (ROOT / "tests/popxl/h100.txtpb").read_text()
target = target.replace("device_memory_size: 84942979072", os.environ["DEVICE_MEMORY"])
topology = topologies.get_topology_desc(platform="cuda", target_config=target, topology="1x1x1")
devices = topology.devices
fused_attention_stablehlo.check_compute_capability = lambda least: True  # it asks the device


def executable(lowered, **other):
    options = compiler.get_compile_options(
        1, 1, device_assignment=np.zeros((1, 1), int), backend=devices[0].client,
        env_options_overrides=Gpu.compiler_options | other,
    )
    return devices[0].client.compile(
        lowered.compiler_ir("stablehlo"),
        executable_devices=_jax.DeviceList(tuple(devices)),
        compile_options=options,
    )


def compiled(lowered, **other):
    return executable(lowered, **other).hlo_modules()[0].to_string()
"""


H100, H200 = 84_942_979_072, 150_754_820_096
"""Bytes of their memory; otherwise XLA compiles the same for both."""


def compiled_for_an_h100(script: str, memory: int = H100) -> list[list[str]]:
    """Fields of the lines that `script` prints, after `DEVICES`, in a process of its own.

    Triton is off: XLA weighs it against cublasLt by timing both on the device.
    """
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_gpu_enable_triton_gemm=false",
        "DEVICE_MEMORY": f"device_memory_size: {memory}",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "runtime/src"), *sys.path]),
    }
    done = subprocess.run(
        [sys.executable, "-c", DEVICES + script],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [line.split(";") for line in done.stdout.splitlines()]


needs_the_compiler = pytest.mark.skipif(
    not any(importlib.util.find_spec(f"jax_cuda{cuda}_plugin") for cuda in (12, 13)),
    reason="neither jax-cuda12-plugin nor jax-cuda13-plugin is installed",
)
