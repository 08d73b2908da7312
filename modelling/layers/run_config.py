"""The run configuration that modules read while they are built."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from config.sections import RunConfig

_CURRENT: ContextVar[RunConfig] = ContextVar("run_config")


@contextmanager
def use_run_config(config: RunConfig) -> Iterator[None]:
    """Context manager: modules built inside take parallelism, precision and kernels from it."""
    token = _CURRENT.set(config)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def current_run_config() -> RunConfig:
    """Returns the configuration of the innermost `use_run_config`.

    Raises:
        LookupError: there is none.
    """
    config = _CURRENT.get(None)
    if config is None:
        raise LookupError("create modules inside `with use_run_config(config):`")
    return config
