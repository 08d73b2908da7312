"""The one place where XLA compiles: platform switches that keep results right and memory in place.

Each switch answers a measured fault of XLA; tests/popxl/test_xla_faults.py shows each fault
without its switch.
"""

from __future__ import annotations

from typing import Any

from popxl._devices import cpu

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
