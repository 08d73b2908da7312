"""Errors and warnings about checkpoints and other files that hold tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import popdist
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


@contextmanager
def raise_damage_on_all_processes() -> Iterator[None]:
    """Context that raises DamagedCheckpointError on all processes if one raises it inside.

    Collective: all processes enter and leave it.
    """
    damage = None
    try:
        yield
    except DamagedCheckpointError as error:
        damage = error
    messages = popdist.all_gather_object(None if damage is None else str(damage))
    message = next((text for text in messages if text is not None), None)
    if message is not None:
        raise DamagedCheckpointError(message) from damage
