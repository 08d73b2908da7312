"""An address of an object store has one run, and one folder that copies to it."""

from __future__ import annotations

import json
import re
import shutil
import socket
import threading
from pathlib import Path

import pytest

from checkpoints import CheckpointError, owner
from checkpoints.owner import FILE_NAME, TakenError, claim, restore
from checkpoints.remote import RemoteRun
from tests.checkpoints.test_remote import check, save


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Owners that are waited for are watched for a moment."""
    monkeypatch.setattr(owner, "SILENCE", 0.2)
    monkeypatch.setattr(owner, "_LOOK", 0.01)


def run_in(folder: Path, *steps: int) -> Path:
    """A run with its steps on the disk, and no mirror yet."""
    folder.mkdir()
    save(folder, *steps)
    return folder


def mirrored(folder: Path, address: str) -> owner.Owner:
    """Claim an address for a run, and copy its steps there."""
    remote = RemoteRun(address)
    owned = claim(folder, remote)
    for path in sorted(folder.glob("0*")):
        remote.put(path, 4)
    return owned


def test_the_owner_is_named_there(tmp_path, address):
    run = run_in(tmp_path / "run", 10)
    owned = claim(run, RemoteRun(address))
    note = json.loads(RemoteRun(address).read(FILE_NAME))
    assert (note["folder"], note["host"]) == (str(run), socket.gethostname())
    kept = json.loads((run / "mirror.json").read_text())
    assert (kept["run"], kept["writer"]) == (note["run"], note["writer"])
    owned.renew()
    assert json.loads(RemoteRun(address).read(FILE_NAME)) == note | {"beat": 2}
    owned.release()
    assert json.loads(RemoteRun(address).read(FILE_NAME)) == note | {"beat": 0}


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
            claim(other, RemoteRun(address), fresh)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        restore(str(other), address)
    assert [step.step for step in RemoteRun(address).steps()] == [10]
    assert not (other / "mirror.json").exists()


@pytest.mark.parametrize("fresh", [True, False])
def test_a_new_folder_is_refused_while_the_owner_lives(tmp_path, address, monkeypatch, fresh):
    monkeypatch.setattr(owner, "SILENCE", 60.0)
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
            claim(tmp_path / "new", RemoteRun(address), fresh)
        if not fresh:
            with pytest.raises(CheckpointError, match=re.escape(message)):
                restore(str(tmp_path / "new"), address)
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
    assert restore(str(new), address) == new / "000000-step-10"
    check(new, 10)
    waited = f"to see whether the run in {one} on {socket.gethostname()} lives, whose mirror is"
    assert (waited in capsys.readouterr().err) != says_so
    owned = claim(new, RemoteRun(address))
    assert capsys.readouterr().err == ""  # it is its own
    message = f"the run in {new} on {socket.gethostname()} has taken {address} over"
    for use in (before.renew, before.release):
        with pytest.raises(TakenError, match=re.escape(message)):
            use()
    owned.release()
    claim(one, RemoteRun(address))
    with pytest.raises(TakenError):
        owned.renew()


def test_a_killed_run_goes_on_at_once_in_its_folder(tmp_path, address, capsys):
    run = run_in(tmp_path / "run", 10)
    mirrored(run, address)
    claim(run, RemoteRun(address)).renew()
    assert capsys.readouterr().err == ""


def test_a_copied_folder_is_another_writer(tmp_path, address, capsys):
    run = run_in(tmp_path / "run", 10)
    mirrored(run, address)
    shutil.copytree(run, tmp_path / "copy")
    claim(tmp_path / "copy", RemoteRun(address))
    assert "to see whether the run in" in capsys.readouterr().err


def test_a_run_that_begins_anew_is_another_run(tmp_path, address):
    """So a folder with steps of the run before does not go on with it."""
    one, new = run_in(tmp_path / "one", 10), tmp_path / "new"
    mirrored(one, address).release()
    claim(new, RemoteRun(address), fresh=True).release()
    save(new, 20)
    with pytest.raises(CheckpointError, match="has another run"):
        claim(one, RemoteRun(address))


def test_a_damaged_note(tmp_path, address, monkeypatch):
    monkeypatch.setattr(owner, "_PAUSES", ())
    remote = RemoteRun(address)
    for text in (b"{", b"[]", b'{"run": "a", "writer": "b", "folder": "c", "host": 5, "beat": 1}'):
        remote.write(FILE_NAME, text)
        with pytest.raises(CheckpointError, match=r"owner.json.*: delete it if no run copies"):
            claim(tmp_path / "run", remote)


def test_a_note_that_is_seen_half_written(tmp_path, address):
    remote = RemoteRun(address)
    claim(tmp_path / "run", remote).release()
    note = remote.read(FILE_NAME) or b""
    remote.write(FILE_NAME, b"")
    writer = threading.Timer(0.1, remote.write, (FILE_NAME, note))
    writer.start()
    claim(tmp_path / "run", remote)
    writer.join()


@pytest.mark.parametrize("refused", ["pipe_file", "rm_file"])
def test_a_store_that_refuses_is_found_at_the_start(tmp_path, address, monkeypatch, refused):
    """Also one that lets be written, and not deleted, as old steps must be."""
    remote = RemoteRun(address)

    def refuse(*given: object, **more: object) -> None:
        raise PermissionError("Forbidden")

    monkeypatch.setattr(remote._store, refused, refuse)
    with pytest.raises(CheckpointError, match=r"cannot copy to or from .*: Forbidden"):
        claim(tmp_path / "run", remote)
