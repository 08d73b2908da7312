"""The one place where XLA compiles: platform switches that keep results right and memory in place.

Each switch answers a measured fault of XLA; tests/popxl/test_xla_faults.py shows each fault
without its switch.
"""

from __future__ import annotations

import os
import re
from typing import Any

_LIBRARY = "xla_cpu_experimental_ynn_fusion_type"
_DETERMINISTIC = "xla_gpu_exclude_nondeterministic_ops"
_SWITCHES: dict[str, dict[str, Any]] = {
    "cpu": {
        # YNNPACK fusions give wrong values for some multiply-reduce shapes (jax#39103, #40412).
        _LIBRARY: "",
    },
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
        if _has_only_float32_products(text):
            # YNNPACK's matrix products by themselves are right, and faster than Eigen's. Some of
            # 16 bits fail when they run, so code with any of those gets none.
            options[_LIBRARY] = "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"
        if _CONTROL_FLOW.search(text):
            # Whole models, such as a loop that generates. The default order of kernels lets
            # independent ones run at once, and so makes all layers' weights ready in advance.
            options["xla_cpu_scheduler_type"] = "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"
        else:
            # Saves copies of donated arrays that several kernels read. With loops it may overwrite
            # an array before a loop that reads it has run.
            options["xla_cpu_copy_insertion_use_region_analysis"] = True
    return lowered.compile(compiler_options=options)


_CONTROL_FLOW = re.compile(r"stablehlo\.(while|case|if)\b")


def _has_only_float32_products(stablehlo: str) -> bool:
    products = re.findall(r"stablehlo\.dot_general.*", stablehlo)
    return bool(products) and all(_FLOAT32_PRODUCT.search(line) for line in products)


_FLOAT32_PRODUCT = re.compile(r": \(tensor<[\dx]*f32>, tensor<[\dx]*f32>\) -> tensor<[\dx]*f32>")


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
