"""The one place where XLA compiles: platform switches that keep results right and memory in place.

Each switch answers a measured fault of XLA; tests/popxl/test_xla_faults.py shows each fault
without its switch.
"""

from __future__ import annotations

import os
from typing import Any

from popxl._lower import cpu

_DETERMINISTIC = "xla_gpu_exclude_nondeterministic_ops"
_SWITCHES: dict[str, dict[str, Any]] = {
    "cpu": cpu.SWITCHES,
    "gpu": {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        # Scatters add in the order in which atomic operations happen to arrive, and cuDNN's
        # attention does so in its gradient: the same program would give other bits in each run.
        _DETERMINISTIC: True,
    },
    "tpu": {},
}


def switches(platform: str) -> dict[str, Any]:
    """Compiler options of a platform ("cpu", "gpu", "tpu"; "cuda" and "rocm" are "gpu")."""
    return dict(_SWITCHES["gpu" if platform in ("cuda", "rocm") else platform])


def compile_lowered(lowered: Any, platform: str) -> Any:
    """Compile a `jax.stages.Lowered` for `platform` with its switches."""
    options = switches(platform)
    text = "" if platform == "tpu" else lowered.as_text()
    if _DETERMINISTIC in options and "stablehlo.select_and_scatter" in text:
        # The gradient of max pooling, which XLA does not compile with it.
        options[_DETERMINISTIC] = False
    if platform == "cpu":
        options |= cpu.switches_for(text)
    return lowered.compile(compiler_options=options)


_PATIENCE = "xla_cpu_collective_call_terminate_timeout_seconds"


def prepare_environment() -> None:
    """Settings XLA reads once, when a backend starts. Values the user has set stay."""
    # The pinned host memory pool of a GPU is 64 GB by default; ours holds the whole model state.
    os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", str(_host_memory_gb()))
    # Replicas of a large layer on few processors may reach a collective minutes apart. XLA would
    # end the process after 40 s.
    flags = os.environ.get("XLA_FLAGS", "")
    if _PATIENCE not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --{_PATIENCE}=1800".strip()


def _host_memory_gb() -> int:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 64
    return max(64, total // 2**30)
