"""File operations of several processes that succeed on all processes or raise on all."""

from __future__ import annotations

import errno
import secrets
import socket
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import popdist
from checkpoints.errors import CheckpointError, CheckpointWarning
from files.atomic_writing import wrap_write_errors, write_synced
from files.errors import FileError
from files.formatting import format_path

RETRY_SECONDS = (1.0, 4.0, 10.0)
"""Seconds before each retry of a save. Errors of a network file system such as ESTALE and EIO are
often transient."""
_VISIBILITY_TIMEOUT = 10.0  # seconds until a network file system shows files of another host

Result = TypeVar("Result")

_PERMANENT_ERRNOS = {
    *(errno.EACCES, errno.EPERM, errno.EROFS),
    *(errno.EEXIST, errno.ENOTDIR, errno.ENAMETOOLONG),
}


class ProcessError(Exception):
    """Failure of one of several processes, raised on all of them; the message names the process.

    Attributes:
        is_final: True if a retry cannot help.
    """

    def __init__(self, text: str, is_final: bool) -> None:
        super().__init__(text)
        self.is_final = is_final


def run_on_all_processes(function: Callable[[], Any], channel: str) -> list[Any]:
    """Call a function on every process; returns the results in order of process index; collective.

    Args:
        function: returns a small JSON value.
        channel: channel of `popdist.all_gather_object`.

    Raises:
        ProcessError: on all processes, with the same message, if one process failed.
    """
    if popdist.getNumInstances() == 1:
        return [function()]
    value, reason, failure = None, None, None
    try:
        value = function()
    except Exception as error:  # peers must not wait for this process
        reason, failure = error_reason(error), error
    is_final = failure is not None and not is_transient(failure)
    outcomes = popdist.all_gather_object([value, reason, socket.gethostname(), is_final], channel)
    if failure is not None and not isinstance(failure, (OSError, FileError)):
        raise failure
    any_final = any(final for *_, final in outcomes)
    for process, (_, reason, host, _) in enumerate(outcomes):
        if reason is not None:
            message = f"process {process} on {host[:30]}: {reason}"
            raise ProcessError(message, any_final) from failure
    return [value for value, *_ in outcomes]


def run_on_first_process(function: Callable[[], Result]) -> Result | None:
    """Call a function on process 0 and return its result there, None elsewhere; collective.

    Raises:
        CheckpointError: on all processes, if a file operation failed on process 0.
    """
    value, message = None, None
    if popdist.getInstanceIndex() == 0:
        try:
            value = function()
        except (FileError, OSError) as error:
            message = str(error)
    if (message := popdist.all_gather_object(message)[0]) is not None:
        raise CheckpointError(message)
    return value


def is_transient(error: Exception) -> bool:
    """True if a retry of the failed file operation can succeed."""
    if isinstance(error, ProcessError):
        return not error.is_final
    if isinstance(error, OSError):
        return error.errno not in _PERMANENT_ERRNOS
    return False


def error_reason(error: Exception) -> str:
    """Return the operating system's reason for a failed file operation, without the file name."""
    return str(getattr(error, "strerror", None) or error)


def save_with_retries(save: Callable[[], None], failure: str) -> None:
    """Call a save function, retrying after each of `RETRY_SECONDS` with a warning; collective.

    Args:
        save: raises the same error on all processes.
        failure: first part of the message, such as "cannot save step 4 in DIR".

    Raises:
        CheckpointError: the last retry failed, or the error is permanent.
    """
    for pause in (*RETRY_SECONDS, None):
        try:
            save()
            break
        except (OSError, ProcessError) as error:
            message = f"{failure}: {error_reason(error)}"
            if pause is None or not is_transient(error):
                raise CheckpointError(message) from error
            if popdist.getInstanceIndex() == 0:
                retry = f"{message}; trying again in {pause:g} s"
                warnings.warn(retry, CheckpointWarning, stacklevel=2)
        time.sleep(pause)


def check_shared_folder(directory: Path) -> None:
    """Create a folder and check that all processes read there what process 0 writes; collective.

    Raises:
        CheckpointError: a process does not see the directory of process 0.
        WriteError: process 0 cannot write there.
    """
    if popdist.getNumInstances() == 1:
        return
    name, nonce = "", secrets.token_hex(16)
    if popdist.getInstanceIndex() == 0:
        name = f".shared-{nonce[:8]}"
        with wrap_write_errors("the folder", directory):
            directory.mkdir(parents=True, exist_ok=True)
            write_synced(directory / name, nonce)
    name, nonce, folder_text = popdist.all_gather_object([name, nonce, format_path(directory)])[0]
    results = popdist.all_gather_object(
        [socket.gethostname(), wait_until_visible(directory / name, nonce)]
    )
    if popdist.getInstanceIndex() == 0:
        (directory / name).unlink(missing_ok=True)
    blind = next((i for i, (_, is_visible) in enumerate(results) if not is_visible), None)
    if blind is not None:
        raise CheckpointError(
            f"process {blind} on {results[blind][0][:30]} does not see what process 0 writes into "
            f"{folder_text}: give --save a folder that all hosts share"
        )


def wait_until_visible(path: Path, content: str | None = None) -> bool:
    """Wait until a network file system shows a new path; returns False on timeout.

    Args:
        content: text that the file must have; None: any.
    """
    end = time.monotonic() + _VISIBILITY_TIMEOUT
    while True:
        with suppress(OSError):
            if path.exists() and (content is None or path.read_text(encoding="utf-8") == content):
                return True
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
