"""Files that several processes write and read together: all of them succeed, or none."""

from __future__ import annotations

import errno
import secrets
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import popdist
from checkpoints.errors import CheckpointError, CheckpointWarning, DamagedError
from files.atomic_writing import write_errors, write_synced
from files.errors import FileError
from files.formatting import format_path

PAUSES = (1.0, 4.0, 10.0)
"""Seconds before each new trial of a save. What a network file system says once, such as ESTALE or
EIO, is over after a moment."""
_SEEN = 10.0  # seconds in which a network file system shows what another host wrote

Made = TypeVar("Made")

_LASTING = {
    *(errno.EACCES, errno.EPERM, errno.EROFS),
    *(errno.EEXIST, errno.ENOTDIR, errno.ENAMETOOLONG),
}


class ProcessError(Exception):
    """One of several processes could not do its share; the text names it.

    Attributes:
        is_final: asking again cannot help.
    """

    def __init__(self, text: str, is_final: bool) -> None:
        super().__init__(text)
        self.is_final = is_final


def on_all_processes(work: Callable[[], Any], channel: str) -> list[Any]:
    """Results of each process's work, in the order of the processes, which all call this.

    Args:
        work: returns something small that JSON can hold.
        channel: of `popdist.all_gather_object`.

    Raises:
        ProcessError: one has failed; all learn of it, with one text, and none waits for it.
    """
    if popdist.getNumInstances() == 1:
        return [work()]
    value, problem, failure = None, None, None
    try:
        value = work()
    except Exception as error:  # the others must not wait for this process
        problem, failure = reason_of(error), error
    lasts = failure is not None and not is_transient(failure)
    everyones = popdist.all_gather_object([value, problem, socket.gethostname(), lasts], channel)
    if failure is not None and not isinstance(failure, (OSError, FileError)):
        raise failure
    final = any(one for *_, one in everyones)
    for process, (_, reason, host, _) in enumerate(everyones):
        if reason is not None:
            raise ProcessError(f"process {process} on {host[:30]}: {reason}", final) from failure
    return [one for one, *_ in everyones]


def on_first_process(work: Callable[[], Made]) -> Made | None:
    """Result of process 0's work, on process 0; None on the others. All call this.

    Raises:
        CheckpointError: on all processes, if a file or the disk fails there.
    """
    value, problem = None, None
    if popdist.getInstanceIndex() == 0:
        try:
            value = work()
        except (FileError, OSError) as error:
            problem = str(error)
    if (problem := popdist.all_gather_object(problem)[0]) is not None:
        raise CheckpointError(problem)
    return value


def is_transient(error: Exception) -> bool:
    """True if a disk may refuse a second time what it did at first."""
    if isinstance(error, ProcessError):
        return not error.is_final
    if isinstance(error, OSError):
        return error.errno not in _LASTING
    return False


@contextmanager
def raise_on_all() -> Iterator[None]:
    """A context in which each process reads values of its own, which all enter and leave.

    Raises:
        DamagedError: on all processes, if one has found damage.
    """
    damage = None
    try:
        yield
    except DamagedError as error:
        damage = error
    everyones = popdist.all_gather_object(None if damage is None else str(damage))
    first = next((text for text in everyones if text is not None), None)
    if first is not None:
        raise DamagedError(first) from damage


def reason_of(error: Exception) -> str:
    """The reason of an error, without the file."""
    return str(getattr(error, "strerror", None) or error)


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
            if pause is None or not is_transient(error):
                raise CheckpointError(reason) from error
            if popdist.getInstanceIndex() == 0:
                again = f"{reason}; trying again in {pause:g} s"
                warnings.warn(again, CheckpointWarning, stacklevel=2)
        time.sleep(pause)


def check_shared(directory: Path) -> None:
    """Check that all processes reach the same directory: what process 0 writes, all must read.

    It is made if it is not there.

    Raises:
        CheckpointError: a process does not see it.
        WriteError: process 0 cannot write.
    """
    if popdist.getNumInstances() == 1:
        return
    name, nonce = "", secrets.token_hex(16)
    if popdist.getInstanceIndex() == 0:
        name = f".shared-{nonce[:8]}"
        with write_errors("the folder", directory):
            directory.mkdir(parents=True, exist_ok=True)
            write_synced(directory / name, nonce)
    name, nonce, shown = popdist.all_gather_object([name, nonce, format_path(directory)])[0]
    views = popdist.all_gather_object([socket.gethostname(), appears(directory / name, nonce)])
    if popdist.getInstanceIndex() == 0:
        (directory / name).unlink(missing_ok=True)
    blind = next((i for i, (_, sees) in enumerate(views) if not sees), None)
    if blind is not None:
        raise CheckpointError(
            f"process {blind} on {views[blind][0][:30]} does not see what process 0 writes into "
            f"{shown}: give --save a folder that all hosts share"
        )


def appears(path: Path, content: str | None = None) -> bool:
    """True if a path exists; network file systems show it after a while.

    Args:
        content: of the file that should be there.
    """
    end = time.monotonic() + _SEEN
    while True:
        with suppress(OSError):
            if path.exists() and (content is None or path.read_text(encoding="utf-8") == content):
                return True
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
