"""A run in an object store, such as s3://bucket/run, which fsspec reaches.

Its folders are those on disk. The manifest of a step is written last and deleted first: a step that
has one is whole.
"""

from __future__ import annotations

import os
import shutil
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from checkpoints.collective_io import reason_of
from checkpoints.errors import CheckpointError, CheckpointWarning
from checkpoints.manifest import FILE_NAME, Manifest
from checkpoints.step_folders import (
    StepFolder,
    remove_leftovers,
    step_draft,
    step_folder,
    step_folders,
)
from checkpoints.tensor_files import is_file_name
from config.values import is_address
from files.folder_lock import lock_folder
from files.formatting import format_name, format_path
from files.run_folder import RunFolder
from files.temp_folders import fsync

_PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"}
_BLOCK = 2**24  # bytes


class RemoteRun:
    """What is stored under an address.

    Every method raises CheckpointError where the store cannot be reached or refuses.
    """

    def __init__(self, address: str) -> None:
        """Find the program that reaches it; nothing is read yet.

        Raises:
            CheckpointError: there is none, or it is not installed.
        """
        from fsspec.core import url_to_fs

        self.address = address.rstrip("/")
        kind = address.split(":")[0]
        options = {"auto_mkdir": True} if kind == "file" else {}
        try:
            self._store, root = url_to_fs(self.address, use_listings_cache=False, **options)
        except ImportError as error:
            package = _PACKAGES.get(kind)
            advice = f"the package {package}: pip install {package}" if package else str(error)
            raise CheckpointError(f"{format_path(address)} needs {advice}") from error
        except Exception as error:
            raise self._unreachable(error) from error
        self._root = Path(root)
        self.moved = time.monotonic()
        """When the store took something last, in seconds of that clock."""

    def steps(self) -> list[StepFolder]:
        """The steps that are whole, the last one saved first."""
        return [s for s in self._folders() if self._exists(s.path / FILE_NAME)]

    def put(self, step: Path, to_keep: int) -> None:
        """Copy a step of a run from the disk, the run's records, its best weights and the steps of
        other runs that it depends on; then delete all but so many steps."""
        run = RunFolder(step.parent)
        for file in run.records:
            with self._reached():
                self._store.put_file(str(file), str(self._root / file.relative_to(run.path)))
        self._below(run.base)._put_bases(run.base)
        best = self._below(run.best)
        for _, _, path in step_folders(run.best)[:1]:
            if all(path.name != there.path.name for there in best.steps()):
                best._put(path, 1)
        self._put(step, to_keep)

    def fetch(self, directory: Path, newer_than: int = -1) -> Path | None:
        """Bring the newest good step into a directory, with the run's records, its best weights and
        the steps of other runs that it depends on.

        Args:
            newer_than: the number of a step that need not be brought, nor those before it.

        Returns:
            Its folder; None: there is no such step. A step that is damaged is a warning.
        """
        if all(step.number <= newer_than for step in self.steps()):
            return None
        run = RunFolder(directory)
        self._below(run.best)._fetch_newest(run.best)
        self._below(run.base)._fetch_bases(run.base)
        self._fetch_records(directory)
        return self._fetch_newest(directory, newer_than)  # last: what is brought half is not there

    def fetch_step(self, directory: Path) -> Path | None:
        """Like `fetch`, where the address may also be that of one step."""
        step = step_folder(self._root)
        if step is None or not self._exists(self._root / FILE_NAME):
            return self.fetch(directory)
        run = RemoteRun(self.address.rpartition("/")[0])
        base = RunFolder(directory).base
        run._below(base)._fetch_bases(base)
        run._fetch_records(directory)
        return run._fetch_good(step.path, directory)

    def has(self, step: Path) -> bool:
        """Whether a step of a run on the disk is there, whole and with the same bytes."""
        return self.read(f"{step.name}/{FILE_NAME}") == (step / FILE_NAME).read_bytes()

    def read(self, name: str) -> bytes | None:
        """A small file, by its name in the run; None if it is not there."""
        with self._reached():
            try:
                return bytes(self._store.cat_file(str(self._root / name)))
            except FileNotFoundError:
                return None

    def write(self, name: str, data: bytes) -> None:
        """Write a small file."""
        with self._reached():
            self._store.pipe_file(str(self._root / name), data)

    def check_writable(self) -> None:
        """Write a file and delete it."""
        name = f"probe-{uuid4().hex}"
        self.write(name, b"")
        with self._reached():
            self._store.rm_file(str(self._root / name))

    def remove(self) -> None:
        """Delete the steps of the run, its best weights, what it depends on and its records."""
        folder = RunFolder(self._root)
        for run in (self, self._below(folder.best)):
            for step in run._folders():
                run._remove(step.path)
        bases = self._below(folder.base)
        for path in bases._bases():
            bases._remove(path)
        with self._reached():
            for file in self._records():
                self._store.rm_file(str(file))

    # ---- steps of other runs, each named by a digest ---------------------------------------------
    def _below(self, folder: Path) -> RemoteRun:
        """Return the runs in a folder of this one."""
        return RemoteRun(f"{self.address}/{folder.name}")

    def _bases(self) -> list[Path]:
        with self._reached():
            paths = self._store.ls(str(self._root), detail=False) if self._exists() else []
        return [path for path in map(Path, paths) if is_file_name(path.name)]

    def _put_bases(self, folder: Path) -> None:
        """Copy those that are not there yet, and delete those that the folder has no more."""
        steps = list(folder.iterdir()) if folder.is_dir() else []
        steps = [step for step in steps if (step / FILE_NAME).is_file()]
        for step in steps:
            if not self.has(step):
                self._put(step, 0)
        names = {step.name for step in steps}
        for there in self._bases():
            if there.name not in names:
                self._remove(there)

    def _fetch_bases(self, folder: Path) -> None:
        for there in self._bases():
            if self._exists(there / FILE_NAME):
                self._fetch_good(there, folder)

    def _fetch_good(self, step: Path, directory: Path) -> Path:
        try:
            return self._fetch_step(step, directory)
        except _DamageError as error:
            place = format_path(f"{self.address}/{step.name}")
            raise CheckpointError(f"{place} is damaged: {error}") from error

    # ---- one step -------------------------------------------------------------------------------
    def _put(self, step: Path, to_keep: int) -> None:
        target = self._root / step.name
        with ExitStack() as stack:
            # Open, so that the run may delete the step meanwhile.
            files = {path.name: stack.enter_context(path.open("rb")) for path in step.iterdir()}
            self._remove(target)
            with self._reached():
                for name in sorted(files, key=FILE_NAME.__eq__):
                    with self._store.open(str(target / name), "wb") as copy:
                        while block := files[name].read(_BLOCK):
                            copy.write(block)
                            self.moved = time.monotonic()
        kept = [target, *(there.path for there in self.steps()[:to_keep])]
        for there in self._folders():
            if there.path not in kept:
                self._remove(there.path)

    def _fetch_newest(self, directory: Path, newer_than: int = -1) -> Path | None:
        for step in self.steps():
            if step.number <= newer_than:
                break
            try:
                return self._fetch_step(step.path, directory)
            except _DamageError as error:
                damaged = f"step {step.step} in {format_path(self.address)} is damaged ({error})"
                warnings.warn(f"{damaged}: using one before", CheckpointWarning, stacklevel=2)
        return None

    def _fetch_step(self, step: Path, directory: Path) -> Path:
        """Copy a step to the disk, and compare it with its digests."""
        with self._reached():
            manifest = self._store.cat_file(str(step / FILE_NAME))
            paths = [Path(path) for path in self._store.ls(str(step), detail=False)]
        target = directory / step.name
        if target.is_dir():
            with suppress(OSError, _DamageError):
                if (target / FILE_NAME).read_bytes() == manifest:
                    _verify(target)
                    return target
            shutil.rmtree(target)  # damaged, or of another run that had this address
        directory.mkdir(parents=True, exist_ok=True)
        remove_leftovers(directory)
        with step_draft(directory, target.name) as draft:
            names = [p.name for p in paths if is_file_name(p.name) and p.name != FILE_NAME]
            with self._reached():
                for name in names:
                    self._store.get_file(str(step / name), str(draft / name))
                    fsync(draft / name)
            (draft / FILE_NAME).write_bytes(manifest)
            fsync(draft / FILE_NAME)
            _verify(draft)
        return target

    def _remove(self, step: Path) -> None:
        with self._reached():
            if self._exists(step / FILE_NAME):
                self._store.rm_file(str(step / FILE_NAME))
            if self._exists(step):
                self._store.rm(str(step), recursive=True)

    # ---- what is there --------------------------------------------------------------------------
    def _folders(self) -> list[StepFolder]:
        """Steps, whole or not, the last one saved first."""
        with self._reached():
            paths = self._store.ls(str(self._root), detail=False) if self._exists() else []
        return sorted(filter(None, (step_folder(Path(path)) for path in paths)), reverse=True)

    def _fetch_records(self, directory: Path) -> None:
        for file in self._records():
            target = directory / file.relative_to(self._root)
            target.parent.mkdir(parents=True, exist_ok=True)
            with self._reached():
                self._store.get_file(str(file), str(target))

    def _records(self) -> list[Path]:
        folder = RunFolder(self._root)
        with self._reached():
            kept = self._store.find(str(folder.tokenizer)) if self._exists(folder.tokenizer) else []
        single = [path for path in folder.single_records if self._exists(path)]
        return [*single, *(p for p in map(Path, kept) if p.parent == folder.tokenizer)]

    def _exists(self, path: Path | None = None) -> bool:
        with self._reached():
            return bool(self._store.exists(str(path or self._root)))

    @contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:  # each store raises exceptions of its own
            raise self._unreachable(error) from error

    def _unreachable(self, error: Exception) -> CheckpointError:
        reason = format_name(" ".join(reason_of(error).split()) or type(error).__name__, 120)
        return CheckpointError(f"cannot copy to or from {format_path(self.address)}: {reason}")


class _DamageError(Exception):
    """A step came from the store, and is not what was saved."""


def _verify(step: Path) -> None:
    """Read all of a step on disk. Raises _DamageError."""
    try:
        manifest = Manifest.read(step)
        manifest.check_texts(step)
        manifest.open(step).verify()
    except CheckpointError as error:
        raise _DamageError(str(error)) from error


def fetched(load: str) -> str:
    """A folder with what an address has, for who only reads it; other names as they are.

    Raises:
        CheckpointError: there is no good step.
    """
    if not is_address(load):
        return load
    run, name = RemoteRun(load), load.split("://")[1].strip("/").replace("/", "--")
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    cache = Path(os.path.expanduser(caches)) / "popxl" / name
    with lock_folder(cache, wait=True):
        newest = run.fetch_step(cache)
        for _, _, path in step_folders(cache):
            if path != newest:
                shutil.rmtree(path)  # which a reader has open
    if newest is None:
        raise CheckpointError(
            f"no checkpoint in {format_path(load)}: give an address that a run was saved to"
        )
    return str(newest)


def local_save(save: str) -> str:
    """Where the steps of a run lie on disk that is saved to an address; other names as they are."""
    return str(Path("runs") / save.split("://")[1].strip("/")) if is_address(save) else save
