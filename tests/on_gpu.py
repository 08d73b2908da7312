"""A plugin of pytest that runs what is written for CPU devices on a GPU.

    JAX_PLATFORMS=cuda,cpu python3 -m pytest -p tests.on_gpu -n 8 tests/popxl/ops

Tests that need several devices are skipped. Those of FP8 products and of the memory that a CPU
takes may fail: tensor cores add float8 in fewer bits than float32.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # workers share the GPU

from popxl._devices import mesh

_platform_of = mesh.platform_of


def _on_gpu(device_desc: str) -> str:
    return "gpu" if device_desc in ("cpu", "ipu_model") else _platform_of(device_desc)


def _too_few_devices(*_: Any) -> Any:
    pytest.skip("needs more devices")


mesh.platform_of, mesh._too_few_devices_error = _on_gpu, _too_few_devices
