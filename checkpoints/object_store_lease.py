"""Lease on an object store address, so that only one run folder uploads to it.

Object stores have no locks. The holder of the lease renews a heartbeat file there. Another run that
finds one watches it for a while, and takes the address over only if the heartbeat stands still.
"""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from uuid import uuid4

from checkpoints.collective_io import run_on_first_process
from checkpoints.errors import CheckpointError
from checkpoints.object_store import RemoteRun
from checkpoints.step_folders import list_step_folders
from files.atomic_writing import write_text_atomically
from files.errors import FileError
from files.folder_lock import lock_folder
from files.formatting import format_name, format_path
from files.json_files import JsonObject, parse_json, read_json_object
from files.run_folder import RunFolder
from terminal.screen import say

FILE_NAME = "owner.json"
HEARTBEAT_SECONDS = 20.0  # between renewals
TIMEOUT_SECONDS = 60.0  # without a renewal, after which a lease has expired
_RETRY_SECONDS = (0.05, 0.2, 1.0)  # before an unreadable lease file is read again
_POLL_SECONDS = 5.0  # between reads of another run's lease


class LeaseLostError(CheckpointError):
    """Another run folder holds the lease on an object store address now."""


@dataclass(frozen=True)
class LeaseRecord:
    """Content of the lease file: the run folder that holds the lease, and its heartbeat.

    Attributes:
        run: unique id of the run, which a folder that resumes the run inherits.
        writer: unique id of the folder that holds the lease.
        folder, host: location of that folder, for messages.
        beat: number of renewals; 0: the lease was released.
    """

    run: str
    writer: str
    folder: str
    host: str
    beat: int = 1

    @property
    def location(self) -> str:
        """Folder and host of the lease's holder, for messages."""
        return f"{format_path(self.folder)} on {format_name(self.host)}"


class Lease:
    """A held lease on an object store address; created by `acquire_lease`."""

    def __init__(self, remote: RemoteRun, record: LeaseRecord) -> None:
        self._remote, self._record = remote, record

    def renew(self) -> None:
        """Increment the heartbeat in the lease file, by which others see that the lease is in use.

        Raises:
            LeaseLostError: another folder has taken the address over.
            CheckpointError: the store cannot be reached.
        """
        self._check_still_held()
        self._record = replace(self._record, beat=self._record.beat + 1)
        _write_record(self._remote, self._record)

    def release(self) -> None:
        """Release the lease at the end of the run; raises LeaseLostError as `renew` does."""
        self._check_still_held()
        _write_record(self._remote, replace(self._record, beat=0))

    def _check_still_held(self) -> None:
        current = _read_record(self._remote)
        held = self._record.run, self._record.writer
        if current is None or (current.run, current.writer) != held:
            who = "somebody has" if current is None else f"the run in {current.location} has"
            raise LeaseLostError(f"{who} taken {format_path(self._remote.address)} over")


def acquire_lease(folder: Path, remote: RemoteRun, is_new_run: bool = False) -> Lease:
    """Acquire the lease on an address for a run folder that the caller has locked.

    A folder without steps takes over the run at the address once its lease has ended.

    Args:
        is_new_run: start a new run; the caller deletes the one at the address.

    Raises:
        CheckpointError: a live run holds the lease, the address has a run other than the folder's,
            or the store denies reading, writing or deleting.
    """
    remote.check_writable()
    local, current = _record_of_folder(folder), _read_record(remote)
    if current is not None and current.writer != local.writer:
        if current.run != local.run and list_step_folders(folder):
            raise CheckpointError(
                f"{format_path(remote.address)} has another run, that of {current.location}: give "
                "another --checkpoint.mirror"
            )
        _wait_until_expired(remote, current)
    run = "" if is_new_run else local.run if current is None else current.run
    record = replace(local, run=run or uuid4().hex)
    ids = {"run": record.run, "writer": record.writer, "folder": record.folder}
    write_text_atomically(
        "the name of the run", RunFolder(folder).mirror_file, json.dumps(ids) + "\n"
    )
    _write_record(remote, record)
    return Lease(remote, record)


def _record_of_folder(folder: Path) -> LeaseRecord:
    """Return the record with which a local run folder acquires a lease.

    Its run is "" if the folder never had a mirror. A copied folder gets a new writer id.
    """
    path, location = RunFolder(folder).mirror_file, os.path.realpath(folder)
    new = LeaseRecord("", uuid4().hex, location, socket.gethostname())
    if not path.is_file():
        return new
    ids = read_json_object(path)
    writer = ids.get_text("writer") if ids.get_text("folder") == location else new.writer
    return replace(new, run=ids.get_text("run"), writer=writer)


def _wait_until_expired(remote: RemoteRun, record: LeaseRecord) -> None:
    """Wait until another holder's lease is released or expires; raises if it is still renewed."""
    address = format_path(remote.address)
    if record.beat:
        say(f"waiting {TIMEOUT_SECONDS:.0f} s for a sign of life of the run in {record.location}, "
            f"whose mirror is {address}")  # fmt: skip
    end, first = time.monotonic() + TIMEOUT_SECONDS, record
    while record.beat and time.monotonic() < end:
        time.sleep(_POLL_SECONDS)
        record = _read_record(remote) or replace(record, beat=0)
        if record.beat and record != first:
            raise CheckpointError(
                f"{address} is in use: the run in {record.location} copies to it; end that one "
                "first, or give another --checkpoint.mirror"
            )


def _read_record(remote: RemoteRun) -> LeaseRecord | None:
    """Read the lease file; returns None if there is none.

    A folder in place of a store can show a partly written file, so reading is retried.
    """
    for pause in (*_RETRY_SECONDS, None):
        data = remote.read_file(FILE_NAME)
        try:
            return None if data is None else _parse_record(data, f"{remote.address}/{FILE_NAME}")
        except FileError as error:
            if pause is None:
                raise CheckpointError(f"{error}: delete it if no run copies there") from error
            time.sleep(pause)
    raise AssertionError


def _parse_record(data: bytes, path: str) -> LeaseRecord:
    fields = JsonObject(parse_json(data.decode(errors="replace"), Path(path)), path)
    run, writer, folder, host = map(fields.get_text, ("run", "writer", "folder", "host"))
    return LeaseRecord(run, writer, folder, host, fields.get_count("beat"))


def _write_record(remote: RemoteRun, record: LeaseRecord) -> None:
    remote.write_file(FILE_NAME, json.dumps(asdict(record)).encode())


def restore_newer_step(save: str, mirror: str) -> Path | None:
    """Download a mirror's newest step unless the local run folder has an equally new one.

    Returns:
        The downloaded step's folder, or None.

    Raises:
        CheckpointError: the mirror cannot be reached, or has another run.
        InUseError: another run writes to the folder.
    """
    folder, remote = Path(save), RemoteRun(mirror)
    with lock_folder(folder):
        if not remote.steps():
            return None
        acquire_lease(folder, remote)
        local_steps = list_step_folders(folder)
        return remote.download_newest(folder, local_steps[0].number if local_steps else -1)


def restore_from_mirror(save: str, mirror: str | None) -> None:
    """Download the newest step from a run's mirror on process 0, if it has a mirror; collective.

    Raises:
        CheckpointError: on all processes, if the download fails.
    """
    if mirror is None:
        return
    step = run_on_first_process(lambda: restore_newer_step(save, mirror))
    if step is not None:
        say(f"{step.name} came from {mirror}")
