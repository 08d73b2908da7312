"""What goes wrong with files that hold tensors."""

from __future__ import annotations

from config.errors import Notice, UserError


class CheckpointError(UserError):
    """A checkpoint or model folder that cannot be read or written."""


class CheckpointWarning(Notice):
    """A checkpoint is damaged, and an older one is used instead."""
