"""Names of popart that PopXL programs use."""

from __future__ import annotations

import enum
import logging
from importlib import metadata

import jax

from popxl._compat.popart_handles import DeviceInfo as DeviceInfo
from popxl.errors import popart_exception as popart_exception
from popxl.errors import poplar_application_runtime_error as poplar_application_runtime_error


def versionString() -> str:  # noqa: N802 - popart's name
    """Returns the version of this runtime in place of PopART's, such as `0.1.0+jax0.10.2`.

    `0+unknown...` where the runtime is used in place, without having been installed.
    """
    try:
        ours = metadata.version("popxl-xla")
    except metadata.PackageNotFoundError:
        ours = "0+unknown"
    separator = "." if "+" in ours else "+"  # a version has one local part
    return f"{ours}{separator}jax{jax.__version__}"


def getLogger(name: str = "all") -> logging.Logger:  # noqa: N802
    """Returns the runtime's logger, or one of its children."""
    return logging.getLogger("popxl" if name == "all" else f"popxl.{name}")


class DataType(enum.Enum):
    """Element types by PopART's names."""

    FLOAT8_143 = "float8_143"
    FLOAT8_152 = "float8_152"
    FLOAT16 = "float16"
    FLOAT = "float32"
    INT32 = "int32"
    UINT32 = "uint32"
    BOOL = "bool"


class VirtualGraphMode(enum.Enum):
    """Values of the session option `virtualGraphMode`, which has no effect on XLA."""

    Off = "Off"
    Manual = "Manual"
    Auto = "Auto"
    ExecutionPhases = "ExecutionPhases"
