"""XLA compilation with the options that each platform needs for correct results.

Each switch answers a measured fault of XLA; tests/popxl/test_xla_faults.py shows each fault
without its switch.
"""

from __future__ import annotations

from typing import Any

from popxl._compile.platforms import get_platform


def compile_lowered(lowered: Any, platform: str) -> Any:
    """Compiles a `jax.stages.Lowered` with the compiler options of `platform`."""
    return lowered.compile(compiler_options=get_platform(platform).compiler_options_for(lowered))
