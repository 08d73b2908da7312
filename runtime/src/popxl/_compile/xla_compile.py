"""The one place where XLA compiles: platform switches that keep results right and memory in place.

Each switch answers a measured fault of XLA; tests/popxl/test_xla_faults.py shows each fault
without its switch.
"""

from __future__ import annotations

from typing import Any

from popxl._compile.platforms import get_platform


def compile_lowered(lowered: Any, platform: str) -> Any:
    """Compile a `jax.stages.Lowered` for `platform` with its switches."""
    return lowered.compile(compiler_options=get_platform(platform).options(lowered))
