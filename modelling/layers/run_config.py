"""The run that modules are made for: what decides how they compute, and not what."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from config.sections import RunConfig

_CURRENT: ContextVar[RunConfig] = ContextVar("run_config")


@contextmanager
def use_run_config(config: RunConfig) -> Iterator[None]:
    """Make modules for a run: its parallelism, precision, quantization, dropout and kernels."""
    token = _CURRENT.set(config)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def current_run_config() -> RunConfig:
    """Return the configuration of the innermost `use_run_config`.

    Raises:
        LookupError: there is none.
    """
    found = _CURRENT.get(None)
    if found is None:
        raise LookupError("modules are made inside `with use_run_config(config):`")
    return found
