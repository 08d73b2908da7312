"""Exceptions of the runtime; `popart` re-exports those with PopART's names."""

from __future__ import annotations

import builtins


def add_error_location(error: BaseException, note: str, location: str) -> None:
    """Adds a source location to an exception: the innermost to the message, all as notes.

    Args:
        note: names what was done there.
        location: `file:line` of the user's program; "": unknown.
    """
    innermost = not getattr(error, "__notes__", ())
    if innermost and location and len(error.args) == 1 and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]} ({location})",)
    error.add_note(f"{location or 'no line'}: {note}")


class UndefinedValue(Exception):
    """A property that the tensor does not have yet, such as `ipu` of a variable."""


class popart_exception(RuntimeError):  # noqa: N801 - the name PopXL programs catch
    """An IR or session that cannot be built or run. Same name as PopART's exception."""


class poplar_application_runtime_error(RuntimeError):  # noqa: N801 - as above
    """A runtime check of a running program failed, such as a check of values."""


class SpecError(popart_exception, ValueError, TypeError):
    """Shapes or dtypes do not fit an op.

    It is a `ValueError`, a `TypeError` and a `popart_exception`, since PopXL raises any of the
    three depending on where the misuse is found, and programs catch either.
    """


class VersionError(popart_exception):
    """The installed JAX computes wrong results on the requested device."""


class DeviceError(popart_exception, builtins.ValueError):
    """Too few devices, or none of the requested kind.

    Attributes:
        platform: the kind: "cpu", "gpu" or "tpu".
        needed, num_available: numbers of devices.
    """

    def __init__(self, message: str, platform: str, needed: int, num_available: int) -> None:
        super().__init__(message)
        self.platform, self.needed, self.num_available = platform, needed, num_available


class DeviceMemoryError(popart_exception, builtins.MemoryError):
    """Out of device memory; variables keep the values that the interrupted run left."""


class DiskError(popart_exception):
    """The folder for remote-buffer entries on disk is full, damaged, or used by another run."""
