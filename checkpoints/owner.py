"""The run that owns an address of an object store, and the folder that copies to it.

A store has no locks. A note there names the owner, which changes it while it lives. So who finds
the note of another watches it for a while, and takes the address over only if nothing changes.
"""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from uuid import uuid4

from checkpoints.collective_io import on_first_process
from checkpoints.errors import CheckpointError
from checkpoints.remote import RemoteRun
from checkpoints.step_folders import step_folders
from files.atomic_writing import write_text
from files.errors import FileError
from files.folder_lock import lock_folder
from files.formatting import format_name, format_path
from files.json_files import JsonObject, parse_json, read_object
from files.run_folder import RunFolder
from terminal.screen import say

FILE_NAME = "owner.json"
BEAT = 20.0  # seconds between changes of the note
SILENCE = 60.0  # seconds without a change, after which its writer is gone
_PAUSES = (0.05, 0.2, 1.0)  # seconds before a note that cannot be read is read again
_LOOK = 5.0  # seconds between looks at the note of another


class TakenError(CheckpointError):
    """Another folder copies to the address now."""


@dataclass(frozen=True)
class Note:
    """What the note says.

    Attributes:
        run: a name of the run that no other has. It goes on to the folder that continues it.
        writer: a name of the folder that no other has.
        folder, host: where that is, for people.
        beat: how often the note was changed; 0: the writer has ended.
    """

    run: str
    writer: str
    folder: str
    host: str
    beat: int = 1

    @property
    def place(self) -> str:
        """The folder, in words."""
        return f"{format_path(self.folder)} on {format_name(self.host)}"


class Owner:
    """A run as the owner of an address."""

    def __init__(self, remote: RemoteRun, note: Note) -> None:
        """See `claim`."""
        self._remote, self._note = remote, note

    def renew(self) -> None:
        """Change the note.

        Raises:
            TakenError: it is another's by now.
            CheckpointError: the store cannot be reached.
        """
        self._check()
        self._note = replace(self._note, beat=self._note.beat + 1)
        _write(self._remote, self._note)

    def release(self) -> None:
        """Note that the run has ended. Raises as `renew`."""
        self._check()
        _write(self._remote, replace(self._note, beat=0))

    def _check(self) -> None:
        found = _read(self._remote)
        if found is None or (found.run, found.writer) != (self._note.run, self._note.writer):
            who = "somebody has" if found is None else f"the run in {found.place} has"
            raise TakenError(f"{who} taken {format_path(self._remote.address)} over")


def claim(folder: Path, remote: RemoteRun, fresh: bool = False) -> Owner:
    """Make the run in a folder, which the caller has locked, the owner of an address.

    A folder without steps takes over the run that is there, once its writer has ended.

    Args:
        fresh: the run begins anew, and what is there will be deleted.

    Raises:
        CheckpointError: a run that lives owns it, or one that is not that of the folder; or the
            store refuses to be read, written or to delete.
    """
    remote.check_writable()
    own, found = _own(folder), _read(remote)
    if found is not None and found.writer != own.writer:
        if found.run != own.run and step_folders(folder):
            raise CheckpointError(
                f"{format_path(remote.address)} has another run, that of {found.place}: give "
                "another --checkpoint.mirror"
            )
        _await_end(remote, found)
    run = "" if fresh else own.run if found is None else found.run
    note = replace(own, run=run or uuid4().hex)
    kept = {"run": note.run, "writer": note.writer, "folder": note.folder}
    write_text("the name of the run", RunFolder(folder).mirror, json.dumps(kept) + "\n")
    _write(remote, note)
    return Owner(remote, note)


def _own(folder: Path) -> Note:
    """The note of a folder; its run is "" if it has had no mirror yet, or was copied with one."""
    path, place = RunFolder(folder).mirror, os.path.realpath(folder)
    new = Note("", uuid4().hex, place, socket.gethostname())
    if not path.is_file():
        return new
    kept = read_object(path)
    writer = kept.text("writer") if kept.text("folder") == place else new.writer
    return replace(new, run=kept.text("run"), writer=writer)


def _await_end(remote: RemoteRun, found: Note) -> None:
    """Return when the writer of a note has ended, or is silent. Raises CheckpointError."""
    place = format_path(remote.address)
    if found.beat:
        say(f"waiting {SILENCE:.0f} s, to see whether the run in {found.place} lives, whose mirror "
            f"is {place}")  # fmt: skip
    end, before = time.monotonic() + SILENCE, found
    while found.beat and time.monotonic() < end:
        time.sleep(_LOOK)
        found = _read(remote) or replace(found, beat=0)
        if found.beat and found != before:
            raise CheckpointError(
                f"{place} is in use: the run in {found.place} copies to it; end that one first, or "
                "give another --checkpoint.mirror"
            )


def _read(remote: RemoteRun) -> Note | None:
    """The note. A folder in place of a store can show it half written, so it is read again."""
    for pause in (*_PAUSES, None):
        data = remote.read(FILE_NAME)
        try:
            return None if data is None else _parsed(data, f"{remote.address}/{FILE_NAME}")
        except FileError as error:
            if pause is None:
                raise CheckpointError(f"{error}: delete it if no run copies there") from error
            time.sleep(pause)
    raise AssertionError


def _parsed(data: bytes, path: str) -> Note:
    fields = JsonObject(parse_json(data.decode(errors="replace"), Path(path)), path)
    run, writer, folder, host = map(fields.text, ("run", "writer", "folder", "host"))
    return Note(run, writer, folder, host, fields.count("beat"))


def _write(remote: RemoteRun, note: Note) -> None:
    remote.write(FILE_NAME, json.dumps(asdict(note)).encode())


def restore(save: str, mirror: str) -> Path | None:
    """Bring the newest step of a mirror into the folder of its run, if that has none so new.

    Raises:
        CheckpointError: the mirror cannot be reached, or is that of another run.
        InUseError: another run writes into the folder.
    """
    folder, remote = Path(save), RemoteRun(mirror)
    with lock_folder(folder):
        if not remote.steps():
            return None
        claim(folder, remote)
        here = step_folders(folder)
        return remote.fetch(folder, here[0].number if here else -1)


def restore_from_mirror(save: str, mirror: str | None) -> None:
    """Bring the run in a mirror to its folder, where that has no step as new.

    Raises:
        CheckpointError: on all processes, if that fails.
    """
    if mirror is None:
        return
    step = on_first_process(lambda: restore(save, mirror))
    if step is not None:
        say(f"{step.name} came from {mirror}")
