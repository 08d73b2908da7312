"""A save that fails is tried again: what a network file system says once, such as ESTALE or EIO, is
over after a moment."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable

import popdist
from checkpoints.errors import CheckpointError, CheckpointWarning
from checkpoints.together import ProcessError, may_pass, reason_of

PAUSES = (1.0, 4.0, 10.0)
"""Seconds before each new trial."""


def save_with_retries(save: Callable[[], None], what: str) -> None:
    """Save, and again with a warning after each of `PAUSES`. All processes succeed, or none.

    Args:
        save: raises the same on all processes.
        what: cannot be done then, for messages.

    Raises:
        CheckpointError: the last trial failed, or no other can help.
    """
    for pause in (*PAUSES, None):
        try:
            save()
            break
        except (OSError, ProcessError) as error:
            reason = f"{what}: {reason_of(error)}"
            if pause is None or not may_pass(error):
                raise CheckpointError(reason) from error
            if popdist.getInstanceIndex() == 0:
                again = f"{reason}; trying again in {pause:g} s"
                warnings.warn(again, CheckpointWarning, stacklevel=2)
        time.sleep(pause)
