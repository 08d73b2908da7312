"""Errors and warnings about checkpoints and other files that hold tensors."""

from __future__ import annotations

from config.errors import UserNotice
from files.errors import FileError


class CheckpointError(FileError):
    """A checkpoint or model folder that cannot be read or written."""


class FormatVersionError(CheckpointError):
    """A checkpoint of another format version; the checkpoint is not damaged."""


class DamagedCheckpointError(CheckpointError):
    """Checkpoint values that cannot be read, or whose SHA-256 is not the recorded one."""


class InconsistentCheckpointError(CheckpointError):
    """Processes see different checkpoints under one path; no checkpoint is damaged."""


class CheckpointWarning(UserNotice):
    """Warning that a damaged checkpoint is skipped, or that a checkpoint cannot be deleted."""
