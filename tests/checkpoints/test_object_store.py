"""Runs in an object store: what is put there comes back, whole or not at all."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import fsspec
import numpy as np
import pytest

from checkpoints import CheckpointError, CheckpointStore, CheckpointWarning, load_checkpoint
from checkpoints import object_store as remote_module
from checkpoints.object_store import RemoteRun, download_if_remote, resolve_save_folder
from checkpoints.object_store_lease import restore_from_mirror, restore_newer_step
from files.run_folder import RunFolder
from tests.run.saved import flip_in


def tensors_of(step: int) -> dict[str, np.ndarray]:
    return {"a": np.arange(1000, dtype=np.float32) * step, "empty": np.zeros((0, 3), np.int8)}


@pytest.fixture
def run(tmp_path) -> RunFolder:
    """A run of steps 10, 20 and 30, of which 20 is the best, with its records."""
    folder = RunFolder(tmp_path / "run")
    save(folder.path, 10, 20, 30)
    save(folder.best_folder, 20)
    folder.tokenizer_folder.mkdir()
    (folder.tokenizer_folder / "tokenizer.json").write_text("{}")
    folder.metrics_file.write_text('{"step": 30}\n')
    return folder


def save(folder: Path, *steps: int) -> None:
    with CheckpointStore(folder) as store:
        for step in steps:
            store.save(step, tensors_of(step), {"step": step}, wait=True)


def put(run: RunFolder, address: str, to_keep: int = 4) -> RemoteRun:
    found = RemoteRun(address)
    for path in sorted(run.path.glob("0*")):
        found.upload(path, to_keep)
    return found


def check(folder: str | Path, step: int) -> None:
    found = load_checkpoint(folder)
    assert found.step == step
    for name, array in tensors_of(step).items():
        np.testing.assert_array_equal(found.tensors[name], array)
        assert found.tensors[name].dtype == array.dtype


def test_a_run_comes_back(run, address, tmp_path):
    there = put(run, address)
    assert [step.step for step in there.steps()] == [30, 20, 10]
    found = there.download_newest(tmp_path / "new")
    assert found == tmp_path / "new" / "000002-step-30"
    check(tmp_path / "new", 30)
    new = RunFolder(tmp_path / "new")
    check(new.best_folder, 20)
    assert new.metrics_file.read_bytes() == run.metrics_file.read_bytes()
    assert (new.tokenizer_folder / "tokenizer.json").read_text() == "{}"
    assert there.download_newest(tmp_path / "other", newer_than=2) is None
    assert not (tmp_path / "other").exists()


def test_older_steps_go(run, address):
    there = put(run, address, to_keep=2)
    assert [step.step for step in there.steps()] == [30, 20]
    there.delete()
    assert there.steps() == there._list_step_folders() == there._list_record_files() == []
    assert there.download_newest(run.path / "new") is None


def kept_in(run: RunFolder, name: str, step: int) -> Path:
    """A step of another run, in the folder of base models."""
    save(run.path.parent / name, step)
    (path,) = (run.path.parent / name).glob("0*")
    return path.rename(run.base_folder / name)


def test_the_steps_that_a_run_depends_on(run, address, tmp_path):
    run.base_folder.mkdir()
    old, both, new = (
        kept_in(run, name * 16, step) for name, step in (("a", 1), ("b", 2), ("c", 3))
    )
    new = new.rename(tmp_path / new.name)
    there = put(run, address)
    shutil.rmtree(old)
    new.rename(run.base_folder / new.name)
    put(run, address)
    there.download_newest(tmp_path / "new")
    found = RunFolder(tmp_path / "new").base_folder
    assert {path.name for path in found.iterdir()} == {both.name, new.name}
    check(found / both.name, 2)
    check(found / new.name, 3)
    one = RemoteRun(f"{address}/000002-step-30").download(tmp_path / "one")
    assert one is not None
    check(RunFolder.from_step_folder(one).base_folder / new.name, 3)
    copy = run.base_folder / new.name
    damage(there._subfolder(run.base_folder), copy, "tensors-00001.safetensors")
    with pytest.raises(CheckpointError, match=rf"base/{new.name} is damaged"):
        there.download_newest(tmp_path / "damaged")
    there.delete()
    assert there._subfolder(run.base_folder)._list_base_models() == []


class Breaking:
    """A store that fails when something is put under a name."""

    def __init__(self, store: object, name: str) -> None:
        self._store, self._name = store, name

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def open(self, path: str, *args: object) -> object:
        if path.endswith(self._name):
            raise ConnectionError("the store is gone")
        return self._store.open(path, *args)


@pytest.mark.parametrize("name", ["tensors-00001.safetensors", "manifest.json"])
def test_a_step_that_is_copied_half_is_none(run, address, tmp_path, monkeypatch, name):
    first, second, _ = sorted(run.path.glob("0*"))
    there = RemoteRun(address)
    there.upload(first, 4)
    with monkeypatch.context() as patch:
        patch.setattr(there, "_store", Breaking(there._store, name))
        with pytest.raises(CheckpointError, match=r"cannot copy to or from .*the store is gone"):
            there.upload(second, 4)
    assert [step.step for step in there.steps()] == [10]
    assert there.download_newest(tmp_path / "new") is not None
    check(tmp_path / "new", 10)
    there.upload(second, 4)
    assert [step.step for step in there.steps()] == [20, 10]


def test_a_step_that_goes_on_disk_while_it_is_copied(run, address, tmp_path, monkeypatch):
    """Its files are open."""
    (first, *_), there = sorted(run.path.glob("0*")), RemoteRun(address)
    remove = there._delete_step

    def gone(step: Path) -> None:
        if first.is_dir():
            remote_module.shutil.rmtree(first)
        remove(step)

    monkeypatch.setattr(there, "_delete_step", gone)
    there.upload(first, 4)
    there.download_newest(tmp_path / "new")
    check(tmp_path / "new", 10)


def damage(there: RemoteRun, step: Path, file: str) -> None:
    """Flip a bit of a step there, and of its original."""
    flip_in(step / file)
    with (
        (step / file).open("rb") as damaged,
        there._store.open(str(there._root / step.name / file), "wb") as copy,
    ):
        copy.write(damaged.read())


@pytest.mark.parametrize("file", ["tensors-00001.safetensors", "manifest.json"])
def test_a_damaged_step_is_left_out(run, address, tmp_path, file):
    newest = run.path / "000002-step-30"
    there = put(run, address)
    damage(there, newest, file)
    with pytest.warns(CheckpointWarning, match=r"step 30 in .* is damaged .* using one before"):
        there.download_newest(tmp_path / "new")
    check(tmp_path / "new", 20)
    with pytest.raises(CheckpointError, match="is damaged"):
        download_if_remote(f"{address}/{newest.name}")


def test_what_is_loaded_is_copied_once(run, address, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    there = put(run, address)
    check(download_if_remote(address), 30)
    check(download_if_remote(f"{address}/000001-step-20/"), 20)
    check(download_if_remote(address), 30)
    copied: list[str] = []
    fetch = type(there._store).get_file
    monkeypatch.setattr(
        type(there._store),
        "get_file",
        lambda self, *args, **more: (copied.append(args[0]), fetch(self, *args, **more))[1],
    )
    check(download_if_remote(address), 30)
    assert not [path for path in copied if path.endswith("safetensors")]
    flip_in(
        Path(download_if_remote(address)) / "tensors-00001.safetensors"
    )  # so it is copied again
    check(download_if_remote(address), 30)
    # A run that was begun anew has other steps under the same names.
    there.delete()
    again = RunFolder(tmp_path / "again")
    with CheckpointStore(again.path) as store:
        for step in (10, 20, 30):
            store.save(step, {"a": np.full(3, step)}, {}, wait=True)
    put(again, address)
    assert load_checkpoint(download_if_remote(address)).tensors["a"].tolist() == [30] * 3


def test_a_mirror_that_is_ahead_is_taken(run, address, tmp_path):
    put(run, address)
    here = tmp_path / "here"
    save(here, 10)
    assert restore_newer_step(str(here), address) == here / "000002-step-30"
    check(here, 30)
    save(here, 40)
    assert restore_newer_step(str(here), address) is None
    check(here, 40)


def test_a_run_begins_with_what_its_mirror_has(run, address, tmp_path, capsys):
    put(run, address)
    restore_from_mirror(str(tmp_path / "here"), address)
    assert capsys.readouterr().err == f"000002-step-30 came from {address}\n"
    check(tmp_path / "here", 30)
    with pytest.raises(CheckpointError, match="cannot copy to or from nosuch://a"):
        restore_from_mirror(str(tmp_path / "there"), "nosuch://a")


def test_a_mirror_whose_further_steps_are_damaged_is_not_taken(run, address, tmp_path):
    there, here = put(run, address), tmp_path / "here"
    damage(there, run.path / "000002-step-30", "manifest.json")
    save(here, 10, 20)
    with pytest.warns(CheckpointWarning, match="step 30 in .* is damaged"):
        assert restore_newer_step(str(here), address) is None
    check(here, 20)


@pytest.mark.parametrize(
    ("address", "match"),
    [
        ("nosuch://bucket/run", "cannot copy to or from nosuch://bucket/run: Protocol not known"),
        ("memory://nothing/here", "no checkpoint in memory://nothing/here: give an address"),
    ],
)
def test_places_that_have_nothing(address, match, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(CheckpointError, match=match):
        download_if_remote(address)


def test_a_package_that_is_missing_is_named(monkeypatch):
    def missing(*args: object, **more: object) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    for address, name in [("s3://b/run", "s3fs"), ("gs://b/run", "gcsfs")]:
        with pytest.raises(CheckpointError, match=f"{address} needs the package {name}: pip inst"):
            RemoteRun(address)


def test_folders_are_no_addresses():
    with warnings.catch_warnings():
        assert download_if_remote("runs/mine") == resolve_save_folder("runs/mine") == "runs/mine"
    assert resolve_save_folder("s3://bucket/mine/") == "runs/bucket/mine"
