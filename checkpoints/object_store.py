"""Upload and download a run's checkpoints to and from an object store, such as s3://bucket/run.

The store has the same folders as the disk. A step's manifest is written last and deleted first, so
that a step with a manifest is complete. Uses fsspec.
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

from checkpoints.collective_io import error_reason
from checkpoints.errors import CheckpointError, CheckpointWarning
from checkpoints.manifest import Manifest
from checkpoints.step_folders import (
    MANIFEST,
    StepFolder,
    list_step_folders,
    parse_step_folder,
    remove_partial_steps,
    tmp_step_folder,
)
from checkpoints.tensor_files import is_file_name
from config.values import is_object_store_url
from files.folder_lock import lock_folder
from files.formatting import format_name, format_path
from files.run_folder import RunFolder
from files.temp_folders import fsync

_PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"}
_COPY_BYTES = 2**24  # bytes per write


class RemoteRun:
    """A training run whose checkpoints are in an object store.

    Every method raises CheckpointError if the store cannot be reached or denies access.
    """

    def __init__(self, address: str) -> None:
        """Create the client of the address's protocol; reads nothing yet.

        Raises:
            CheckpointError: the protocol is unknown, or its package is not installed.
        """
        from fsspec.core import url_to_fs

        self.address = address.rstrip("/")
        protocol = address.split(":")[0]
        options = {"auto_mkdir": True} if protocol == "file" else {}
        try:
            self._store, root = url_to_fs(self.address, use_listings_cache=False, **options)
        except ImportError as error:
            package = _PACKAGES.get(protocol)
            advice = f"the package {package}: pip install {package}" if package else str(error)
            raise CheckpointError(f"{format_path(address)} needs {advice}") from error
        except Exception as error:
            raise self._to_checkpoint_error(error) from error
        self._root = Path(root)
        self.last_progress = time.monotonic()
        """Time of the last successful write, in seconds of the monotonic clock."""

    def steps(self) -> list[StepFolder]:
        """Return the run's completely uploaded checkpoint steps, newest first."""
        return [s for s in self._list_step_folders() if self._exists(s.path / MANIFEST)]

    def upload(self, step: Path, to_keep: int) -> None:
        """Upload a step folder with the run's other files; delete all but `to_keep` uploads."""
        run = RunFolder(step.parent)
        for file in run.record_files:
            with self._wrap_store_errors():
                self._store.put_file(str(file), str(self._root / file.relative_to(run.path)))
        self._subfolder(run.base_folder)._upload_base_models(run.base_folder)
        best = self._subfolder(run.best_folder)
        for _, _, path in list_step_folders(run.best_folder)[:1]:
            if all(path.name != step.path.name for step in best.steps()):
                best._upload_step(path, 1)
        self._upload_step(step, to_keep)

    def download_newest(self, directory: Path, newer_than: int = -1) -> Path | None:
        """Download the newest undamaged step, with the run's records (config, metrics) and models.

        A damaged step is a warning.

        Args:
            newer_than: save number; this step and older ones are not downloaded.

        Returns:
            The step's folder; None if there is no such step.
        """
        if all(step.number <= newer_than for step in self.steps()):
            return None
        run = RunFolder(directory)
        self._subfolder(run.best_folder)._download_newest_step(run.best_folder)
        self._subfolder(run.base_folder)._download_base_models(run.base_folder)
        self._download_records(directory)
        return self._download_newest_step(directory, newer_than)  # last: marks the rest complete

    def download(self, directory: Path) -> Path | None:
        """Download the checkpoint step at this address, or the newest step if it is a run's."""
        step = parse_step_folder(self._root)
        if step is None or not self._exists(self._root / MANIFEST):
            return self.download_newest(directory)
        run = RemoteRun(self.address.rpartition("/")[0])
        base = RunFolder(directory).base_folder
        run._subfolder(base)._download_base_models(base)
        run._download_records(directory)
        return run._download_undamaged(step.path, directory)

    def has_step(self, step: Path) -> bool:
        """True if the object store has a complete copy of a local step folder."""
        return self.read_file(f"{step.name}/{MANIFEST}") == (step / MANIFEST).read_bytes()

    def read_file(self, name: str) -> bytes | None:
        """Read a small file of the run from the object store; None if it does not exist."""
        with self._wrap_store_errors():
            try:
                return bytes(self._store.cat_file(str(self._root / name)))
            except FileNotFoundError:
                return None

    def write_file(self, name: str, data: bytes) -> None:
        """Write a small file of the run to the object store."""
        with self._wrap_store_errors():
            self._store.pipe_file(str(self._root / name), data)

    def check_writable(self) -> None:
        """Check that files can be written to and deleted from the object store."""
        name = f"probe-{uuid4().hex}"
        self.write_file(name, b"")
        with self._wrap_store_errors():
            self._store.rm_file(str(self._root / name))

    def delete(self) -> None:
        """Delete the run from the object store: steps, best weights, base models, records."""
        folder = RunFolder(self._root)
        for run in (self, self._subfolder(folder.best_folder)):
            for step in run._list_step_folders():
                run._delete_step(step.path)
        bases = self._subfolder(folder.base_folder)
        for path in bases._list_base_models():
            bases._delete_step(path)
        with self._wrap_store_errors():
            for file in self._list_record_files():
                self._store.rm_file(str(file))

    # ---- base models: steps of other runs, in folders named by digest ----------------------------
    def _subfolder(self, folder: Path) -> RemoteRun:
        """Return the remote run in a subfolder of this one, such as `best`."""
        return RemoteRun(f"{self.address}/{folder.name}")

    def _list_base_models(self) -> list[Path]:
        with self._wrap_store_errors():
            paths = self._store.ls(str(self._root), detail=False) if self._exists() else []
        return [path for path in map(Path, paths) if is_file_name(path.name)]

    def _upload_base_models(self, folder: Path) -> None:
        """Upload missing base models, and delete uploaded ones that the local folder lacks."""
        steps = list(folder.iterdir()) if folder.is_dir() else []
        steps = [step for step in steps if (step / MANIFEST).is_file()]
        for step in steps:
            if not self.has_step(step):
                self._upload_step(step, 0)
        names = {step.name for step in steps}
        for path in self._list_base_models():
            if path.name not in names:
                self._delete_step(path)

    def _download_base_models(self, folder: Path) -> None:
        for path in self._list_base_models():
            if self._exists(path / MANIFEST):
                self._download_undamaged(path, folder)

    def _download_undamaged(self, step: Path, directory: Path) -> Path:
        try:
            return self._download_step(step, directory)
        except _DamagedDownloadError as error:
            address = format_path(f"{self.address}/{step.name}")
            raise CheckpointError(f"{address} is damaged: {error}") from error

    # ---- one step -------------------------------------------------------------------------------
    def _upload_step(self, step: Path, to_keep: int) -> None:
        target = self._root / step.name
        with ExitStack() as stack:
            # Open files stay readable when the run deletes the step meanwhile.
            files = {path.name: stack.enter_context(path.open("rb")) for path in step.iterdir()}
            self._delete_step(target)
            with self._wrap_store_errors():
                for name in sorted(files, key=MANIFEST.__eq__):  # the manifest last
                    with self._store.open(str(target / name), "wb") as copy:
                        while block := files[name].read(_COPY_BYTES):
                            copy.write(block)
                            self.last_progress = time.monotonic()
        kept = [target, *(folder.path for folder in self.steps()[:to_keep])]
        for folder in self._list_step_folders():
            if folder.path not in kept:
                self._delete_step(folder.path)

    def _download_newest_step(self, directory: Path, newer_than: int = -1) -> Path | None:
        for step in self.steps():
            if step.number <= newer_than:
                break
            try:
                return self._download_step(step.path, directory)
            except _DamagedDownloadError as error:
                damaged = f"step {step.step} in {format_path(self.address)} is damaged ({error})"
                warnings.warn(f"{damaged}: using one before", CheckpointWarning, stacklevel=2)
        return None

    def _download_step(self, step: Path, directory: Path) -> Path:
        """Download a saved step and verify the SHA-256 of all files; returns the local folder."""
        with self._wrap_store_errors():
            manifest = self._store.cat_file(str(step / MANIFEST))
            paths = [Path(path) for path in self._store.ls(str(step), detail=False)]
        target = directory / step.name
        if target.is_dir():
            with suppress(OSError, _DamagedDownloadError):
                if (target / MANIFEST).read_bytes() == manifest:
                    _verify_step_files(target)
                    return target
            shutil.rmtree(target)  # damaged, or of an earlier run at this address
        directory.mkdir(parents=True, exist_ok=True)
        remove_partial_steps(directory)
        with tmp_step_folder(directory, target.name) as tmp_folder:
            names = [p.name for p in paths if is_file_name(p.name) and p.name != MANIFEST]
            with self._wrap_store_errors():
                for name in names:
                    self._store.get_file(str(step / name), str(tmp_folder / name))
                    fsync(tmp_folder / name)
            (tmp_folder / MANIFEST).write_bytes(manifest)
            fsync(tmp_folder / MANIFEST)
            _verify_step_files(tmp_folder)
        return target

    def _delete_step(self, step: Path) -> None:
        with self._wrap_store_errors():
            if self._exists(step / MANIFEST):
                self._store.rm_file(str(step / MANIFEST))
            if self._exists(step):
                self._store.rm(str(step), recursive=True)

    # ---- listing --------------------------------------------------------------------------------
    def _list_step_folders(self) -> list[StepFolder]:
        """Return the folders of all uploaded steps, also incomplete ones, newest first."""
        with self._wrap_store_errors():
            paths = self._store.ls(str(self._root), detail=False) if self._exists() else []
        return sorted(filter(None, (parse_step_folder(Path(path)) for path in paths)), reverse=True)

    def _download_records(self, directory: Path) -> None:
        for file in self._list_record_files():
            target = directory / file.relative_to(self._root)
            target.parent.mkdir(parents=True, exist_ok=True)
            with self._wrap_store_errors():
                self._store.get_file(str(file), str(target))

    def _list_record_files(self) -> list[Path]:
        folder = RunFolder(self._root)
        with self._wrap_store_errors():
            has_tokenizer = self._exists(folder.tokenizer_folder)
            found = self._store.find(str(folder.tokenizer_folder)) if has_tokenizer else []
        tokenizer = [path for path in map(Path, found) if path.parent == folder.tokenizer_folder]
        return [*(path for path in folder.resume_files if self._exists(path)), *tokenizer]

    def _exists(self, path: Path | None = None) -> bool:
        with self._wrap_store_errors():
            return bool(self._store.exists(str(path or self._root)))

    @contextmanager
    def _wrap_store_errors(self) -> Iterator[None]:
        """A context that turns exceptions of the object store into CheckpointError."""
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:  # fsspec implementations share no exception type
            raise self._to_checkpoint_error(error) from error

    def _to_checkpoint_error(self, error: Exception) -> CheckpointError:
        reason = format_name(" ".join(error_reason(error).split()) or type(error).__name__, 120)
        return CheckpointError(f"cannot copy to or from {format_path(self.address)}: {reason}")


class _DamagedDownloadError(Exception):
    """A downloaded step whose files do not match their SHA-256."""


def _verify_step_files(step: Path) -> None:
    """Verify the SHA-256 of all files of a step folder; raises _DamagedDownloadError."""
    try:
        manifest = Manifest.read(step)
        manifest.check_text_files(step)
        manifest.open_tensor_files(step).verify()
    except CheckpointError as error:
        raise _DamagedDownloadError(str(error)) from error


def download_if_remote(load: str) -> str:
    """Download the checkpoint at an object store address to a cache; returns the step's folder.

    A name that is not an address is returned unchanged.

    Raises:
        CheckpointError: there is no undamaged step.
    """
    if not is_object_store_url(load):
        return load
    run, name = RemoteRun(load), load.split("://")[1].strip("/").replace("/", "--")
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    cache = Path(os.path.expanduser(caches)) / "popxl" / name
    with lock_folder(cache, wait=True):
        newest = run.download(cache)
        for _, _, path in list_step_folders(cache):
            if path != newest:
                shutil.rmtree(path)  # readers have its files open
    if newest is None:
        raise CheckpointError(
            f"no checkpoint in {format_path(load)}: give an address that a run was saved to"
        )
    return str(newest)


def resolve_save_folder(save: str) -> str:
    """Return the local folder for `--save` if it is an object store URL; a path is unchanged."""
    return (
        str(Path("runs") / save.split("://")[1].strip("/")) if is_object_store_url(save) else save
    )
