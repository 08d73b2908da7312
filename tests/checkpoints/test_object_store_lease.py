"""An address of an object store has one run, and one folder that copies to it."""

from __future__ import annotations

import json
import re
import shutil
import socket
import threading
from pathlib import Path

import pytest

from checkpoints import CheckpointError, object_store_lease
from checkpoints.object_store import RemoteRun
from checkpoints.object_store_lease import (
    FILE_NAME,
    LeaseLostError,
    acquire_lease,
    restore_newer_step,
)
from tests.checkpoints.test_object_store import check, save


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Owners that are waited for are watched for a moment."""
    monkeypatch.setattr(object_store_lease, "TIMEOUT_SECONDS", 0.2)
    monkeypatch.setattr(object_store_lease, "_POLL_SECONDS", 0.01)


def run_in(folder: Path, *steps: int) -> Path:
    """A run with its steps on the disk, and no mirror yet."""
    folder.mkdir()
    save(folder, *steps)
    return folder


def mirrored(folder: Path, address: str) -> object_store_lease.Lease:
    """Claim an address for a run, and copy its steps there."""
    remote = RemoteRun(address)
    owned = acquire_lease(folder, remote)
    for path in sorted(folder.glob("0*")):
        remote.upload(path, 4)
    return owned


def test_the_owner_is_named_there(tmp_path, address):
    run = run_in(tmp_path / "run", 10)
    owned = acquire_lease(run, RemoteRun(address))
    note = json.loads(RemoteRun(address).read_file(FILE_NAME))
    assert (note["folder"], note["host"]) == (str(run), socket.gethostname())
    kept = json.loads((run / "mirror.json").read_text())
    assert (kept["run"], kept["writer"]) == (note["run"], note["writer"])
    owned.renew()
    assert json.loads(RemoteRun(address).read_file(FILE_NAME)) == note | {"beat": 2}
    owned.release()
    assert json.loads(RemoteRun(address).read_file(FILE_NAME)) == note | {"beat": 0}


@pytest.mark.parametrize("ended", [True, False])
def test_a_run_with_steps_of_its_own_is_refused_where_another_one_is(tmp_path, address, ended):
    """Each would take the other's steps for old ones, and delete them."""
    one, other = run_in(tmp_path / "one", 10), run_in(tmp_path / "other", 10, 20)
    owned = mirrored(one, address)
    if ended:
        owned.release()
    message = f"{address} has another run, that of {one} on {socket.gethostname()}: give another"
    for fresh in (False, True):
        with pytest.raises(CheckpointError, match=re.escape(message)):
            acquire_lease(other, RemoteRun(address), fresh)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        restore_newer_step(str(other), address)
    assert [step.step for step in RemoteRun(address).steps()] == [10]
    assert not (other / "mirror.json").exists()


@pytest.mark.parametrize("fresh", [True, False])
def test_a_new_folder_is_refused_while_the_owner_lives(tmp_path, address, monkeypatch, fresh):
    monkeypatch.setattr(object_store_lease, "TIMEOUT_SECONDS", 60.0)
    owned = mirrored(run_in(tmp_path / "one", 10), address)
    ended = threading.Event()

    def live() -> None:
        while not ended.wait(0.01):
            owned.renew()

    beats = threading.Thread(target=live)
    beats.start()
    try:
        message = f"{address} is in use: the run in {tmp_path}/one on {socket.gethostname()}"
        with pytest.raises(CheckpointError, match=re.escape(message)):
            acquire_lease(tmp_path / "new", RemoteRun(address), fresh)
        if not fresh:
            with pytest.raises(CheckpointError, match=re.escape(message)):
                restore_newer_step(str(tmp_path / "new"), address)
    finally:
        ended.set()
        beats.join()
    owned.renew()  # it is the owner as before


@pytest.mark.parametrize("says_so", [True, False])
def test_a_new_machine_takes_over_what_has_ended(tmp_path, address, capsys, says_so):
    """At once where the owner has said so; else after it was silent for a while. An owner that has
    only been away learns that it is none any more, and its folder goes on as the same run."""
    one, new = run_in(tmp_path / "one", 10), tmp_path / "new"
    before = mirrored(one, address)
    if says_so:
        before.release()
    assert restore_newer_step(str(new), address) == new / "000000-step-10"
    check(new, 10)
    waited = f"for a sign of life of the run in {one} on {socket.gethostname()}, whose mirror is"
    assert (waited in capsys.readouterr().err) != says_so
    owned = acquire_lease(new, RemoteRun(address))
    assert capsys.readouterr().err == ""  # it is its own
    message = f"the run in {new} on {socket.gethostname()} has taken {address} over"
    for use in (before.renew, before.release):
        with pytest.raises(LeaseLostError, match=re.escape(message)):
            use()
    owned.release()
    acquire_lease(one, RemoteRun(address))
    with pytest.raises(LeaseLostError):
        owned.renew()


def test_a_killed_run_goes_on_at_once_in_its_folder(tmp_path, address, capsys):
    run = run_in(tmp_path / "run", 10)
    mirrored(run, address)
    acquire_lease(run, RemoteRun(address)).renew()
    assert capsys.readouterr().err == ""


def test_a_copied_folder_is_another_writer(tmp_path, address, capsys):
    run = run_in(tmp_path / "run", 10)
    mirrored(run, address)
    shutil.copytree(run, tmp_path / "copy")
    acquire_lease(tmp_path / "copy", RemoteRun(address))
    assert "for a sign of life of the run in" in capsys.readouterr().err


def test_a_run_that_begins_anew_is_another_run(tmp_path, address):
    """So a folder with steps of the run before does not go on with it."""
    one, new = run_in(tmp_path / "one", 10), tmp_path / "new"
    mirrored(one, address).release()
    acquire_lease(new, RemoteRun(address), is_new_run=True).release()
    save(new, 20)
    with pytest.raises(CheckpointError, match="has another run"):
        acquire_lease(one, RemoteRun(address))


def test_a_damaged_note(tmp_path, address, monkeypatch):
    monkeypatch.setattr(object_store_lease, "_RETRY_SECONDS", ())
    remote = RemoteRun(address)
    for text in (b"{", b"[]", b'{"run": "a", "writer": "b", "folder": "c", "host": 5, "beat": 1}'):
        remote.write_file(FILE_NAME, text)
        with pytest.raises(CheckpointError, match=r"owner.json.*: delete it if no run copies"):
            acquire_lease(tmp_path / "run", remote)


def test_a_note_that_is_seen_half_written(tmp_path, address):
    remote = RemoteRun(address)
    acquire_lease(tmp_path / "run", remote).release()
    note = remote.read_file(FILE_NAME) or b""
    remote.write_file(FILE_NAME, b"")
    writer = threading.Timer(0.1, remote.write_file, (FILE_NAME, note))
    writer.start()
    acquire_lease(tmp_path / "run", remote)
    writer.join()


@pytest.mark.parametrize("refused", ["pipe_file", "rm_file"])
def test_a_store_that_refuses_is_found_at_the_start(tmp_path, address, monkeypatch, refused):
    """Also one that lets be written, and not deleted, as old steps must be."""
    remote = RemoteRun(address)

    def refuse(*given: object, **more: object) -> None:
        raise PermissionError("Forbidden")

    monkeypatch.setattr(remote._store, refused, refuse)
    with pytest.raises(CheckpointError, match=r"cannot copy to or from .*: Forbidden"):
        acquire_lease(tmp_path / "run", remote)
