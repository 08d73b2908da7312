"""Errors and warnings about checkpoints and other files that hold tensors."""

from __future__ import annotations

from config.errors import UserNotice
from files.errors import FileError


class CheckpointError(FileError):
    """A checkpoint or model folder that cannot be read or written."""


class OtherFormatError(CheckpointError):
    """A checkpoint of another format version; it is not damaged."""


class DamagedError(CheckpointError):
    """Values that cannot be read, or whose digest is not the saved one."""


class DifferentCopiesError(CheckpointError):
    """Processes that see different checkpoints under one path; none is damaged."""


class CheckpointWarning(UserNotice):
    """Warning: a damaged checkpoint is skipped, or one cannot be deleted."""
