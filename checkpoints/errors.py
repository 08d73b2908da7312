"""What goes wrong with files that hold tensors."""

from __future__ import annotations

from config.errors import Notice
from files.errors import FileError


class CheckpointError(FileError):
    """A checkpoint or model folder that cannot be read or written."""


class OtherFormatError(CheckpointError):
    """A checkpoint that another version of this program wrote. It is not damaged."""


class DamagedError(CheckpointError):
    """Values in a file that are not what was saved, or cannot be read, found as they are read."""


class DifferentCopiesError(CheckpointError):
    """Processes that read different checkpoints under one name. Neither is damaged."""


class CheckpointWarning(Notice):
    """A checkpoint is damaged, and an older one is used; or one cannot be deleted."""
