"""Print ops that run only if their log level is enabled.

The environment variable MODEL_LOG_LEVEL (TRACE, DEBUG, INFO or WARN; default INFO) is read when
a program is built: prints below it are not built at all.
"""

from __future__ import annotations

import logging
import os
from typing import Any, Literal

import popxl
from popxl import ops

__all__ = ["print_tensor", "print_text"]

logger = logging.getLogger(__name__)

LEVELS_TYPE = Literal["TRACE", "DEBUG", "INFO", "WARN"]
LEVELS: dict[str, int] = {"TRACE": 0, "DEBUG": 1, "INFO": 2, "WARN": 3}


def _is_enabled(level: LEVELS_TYPE) -> bool:
    wanted = os.environ.get("MODEL_LOG_LEVEL", "INFO")
    if wanted not in LEVELS or level not in LEVELS:
        bad = level if wanted in LEVELS else wanted
        raise ValueError(f"unknown log level {bad!r}: use one of {', '.join(LEVELS)}")
    return LEVELS[level] >= LEVELS[wanted]


def print_tensor(
    t: popxl.Tensor, *args: Any, level: LEVELS_TYPE = "DEBUG", **kwargs: Any
) -> popxl.Tensor:
    """Print a tensor at run time if `level` is enabled, as `ops.print_tensor`; else return `t`."""
    return ops.print_tensor(t, *args, **kwargs) if _is_enabled(level) else t


def print_text(text: str, num: popxl.Tensor | None = None, level: LEVELS_TYPE = "DEBUG") -> None:
    """Print `text`, and a number, each time the program reaches this op, if `level` is enabled."""
    if _is_enabled(level):
        value = popxl.constant(0, popxl.int32) if num is None else num
        ops.print_tensor(value, title=text)
