"""Work that each of several processes does a share of, and that is done only if all can."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from safetensors import SafetensorError

import popdist
from checkpoints.errors import DamagedError
from files.errors import FileError


class ProcessError(Exception):
    """One of several processes could not do its share; the text names it."""


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
    everyones = popdist.gather([value, problem, socket.gethostname()], channel)
    if failure is not None and not isinstance(failure, (OSError, SafetensorError, FileError)):
        raise failure
    for process, (_, found, host) in enumerate(everyones):
        if found is not None:
            raise ProcessError(f"process {process} on {host[:30]}: {found}") from failure
    return [one for one, _, _ in everyones]


@contextmanager
def damage_told() -> Iterator[None]:
    """A context in which each process reads values of its own, which all enter and leave.

    Raises:
        DamagedError: on all processes, if one has found damage.
    """
    found = None
    try:
        yield
    except DamagedError as error:
        found = error
    everyones = popdist.gather(None if found is None else str(found))
    first = next((text for text in everyones if text is not None), None)
    if first is not None:
        raise DamagedError(first) from found


def reason_of(error: Exception) -> str:
    """What went wrong, without the file."""
    return str(getattr(error, "strerror", None) or error)
