"""Work that each of several processes does a share of, and that is done only if all can."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import popdist
from checkpoints.errors import CheckpointError, DamagedError
from files.errors import FileError

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
    """What each process's work returned, in the order of the processes, which all call this.

    Args:
        work: returns something small that JSON can hold.
        channel: of `popdist.gather`.

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
    lasts = failure is not None and not may_pass(failure)
    everyones = popdist.gather([value, problem, socket.gethostname(), lasts], channel)
    if failure is not None and not isinstance(failure, (OSError, FileError)):
        raise failure
    final = any(one for *_, one in everyones)
    for process, (_, reason, host, _) in enumerate(everyones):
        if reason is not None:
            raise ProcessError(f"process {process} on {host[:30]}: {reason}", final) from failure
    return [one for one, *_ in everyones]


def on_first_process(work: Callable[[], Made]) -> Made | None:
    """What process 0's work returned, on process 0; None on the others. All call this.

    Raises:
        CheckpointError: on all processes, if a file or the disk fails there.
    """
    value, problem = None, None
    if popdist.getInstanceIndex() == 0:
        try:
            value = work()
        except (FileError, OSError) as error:
            problem = str(error)
    if (problem := popdist.gather(problem)[0]) is not None:
        raise CheckpointError(problem)
    return value


def may_pass(error: Exception) -> bool:
    """Whether a disk may do no more what it did, when it is asked again."""
    if isinstance(error, ProcessError):
        return not error.is_final
    if isinstance(error, OSError):
        return error.errno not in _LASTING
    return False


@contextmanager
def damage_told() -> Iterator[None]:
    """A context in which each process reads values of its own, which all enter and leave.

    Raises:
        DamagedError: on all processes, if one has found damage.
    """
    damage = None
    try:
        yield
    except DamagedError as error:
        damage = error
    everyones = popdist.gather(None if damage is None else str(damage))
    first = next((text for text in everyones if text is not None), None)
    if first is not None:
        raise DamagedError(first) from damage


def reason_of(error: Exception) -> str:
    """What went wrong, without the file."""
    return str(getattr(error, "strerror", None) or error)
