"""Mirror of a run's checkpoints in an object store, uploaded in the background."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

from checkpoints.collective_io import RETRY_SECONDS, run_on_first_process
from checkpoints.errors import CheckpointError
from checkpoints.object_store import RemoteRun
from checkpoints.object_store_lease import HEARTBEAT_SECONDS, Lease, LeaseLostError, acquire_lease
from checkpoints.step_folders import list_step_folders
from files.formatting import format_path
from terminal.interrupts import Interrupted
from terminal.screen import say

PATIENCE = 300.0
"""Seconds without upload progress after which the end of a run stops waiting."""
PATIENCE_AFTER_SIGNAL = 30.0
"""Seconds without upload progress after a stop signal."""
_RELEASE_TIMEOUT = 5.0  # seconds to release the lease at the end


class CheckpointMirror:
    """Mirror of a run in an object store: uploads the newest saved step, one at a time.

    A context manager that holds the lease of the address; its end waits for the last upload.
    """

    def __init__(self, address: str, to_keep: int, folder: Path, fresh: bool = False) -> None:
        """Acquire the lease of the address.

        Args:
            address: address of the run in the store.
            to_keep: number of newest steps to keep there.
            folder: local run folder, which the caller has locked.
            fresh: the run starts over. Otherwise its newest step is uploaded if the store lacks it.

        Raises:
            CheckpointError: the store denies access, or has another run.
        """
        self._remote, self._to_keep, self._folder = RemoteRun(address), to_keep, folder
        self._lease: Lease = acquire_lease(folder, self._remote, fresh)
        self._lock = threading.Lock()
        self._next: tuple[int, Path] | None = None  # step to upload after the current one
        self._uploader: threading.Thread | None = None
        self._ended = threading.Event()
        self._heartbeat = threading.Thread(target=self._renew_lease, name="lease", daemon=True)
        self._failure = ""
        self._last_requested: int | None = None
        self.got_signal = False
        """True if a signal stops the run."""
        self.last_uploaded: int | None = None
        """The last step that is known to be in the store."""
        if not fresh:
            self._upload_newest()

    def upload(self, step: int, folder: Path) -> None:
        """Upload a step folder in the background, replacing one that still waits to be uploaded."""
        with self._lock:
            self._next, self._last_requested = (step, folder), step
            if self._uploader is None:
                self._uploader = threading.Thread(
                    target=self._upload_loop, name="mirror", daemon=True
                )
                self._uploader.start()

    def delete(self) -> None:
        """Delete the run in the object store; raises CheckpointError."""
        self._remote.delete()

    def wait(self) -> None:
        """Wait for the last upload; gives up after `PATIENCE` seconds without progress."""
        with self._lock:
            uploader = self._uploader
        if uploader is None:
            return
        say(f"copying to {self._remote.address}")
        patience, start = PATIENCE_AFTER_SIGNAL if self.got_signal else PATIENCE, time.monotonic()
        while uploader.is_alive():
            uploader.join(0.1)
            if time.monotonic() - max(start, self._remote.last_progress) > patience:
                self._failure = f"it has taken nothing for {patience:.0f} s"
                return

    @property
    def failure_message(self) -> str | None:
        """Message to the user if the newest step is not in the object store; else None."""
        if self.last_uploaded == self._last_requested:
            return None
        last = "none" if self.last_uploaded is None else f"step {self.last_uploaded}"
        address = format_path(self._remote.address)
        return (
            f"step {self._last_requested} is not in {address} ({self._failure}), the last that "
            f"this run copied there is {last}; it is in {format_path(self._folder)}: the same "
            "command copies it"
        )

    def __enter__(self) -> Self:
        self._heartbeat.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None or not issubclass(kind, Interrupted):
                self.wait()
        finally:
            self._ended.set()
            self._heartbeat.join(_RELEASE_TIMEOUT)

    # ---- threads --------------------------------------------------------------------------------
    def _renew_lease(self) -> None:
        """Renew the lease on the object store address until the run ends, then release it."""
        while not self._ended.wait(HEARTBEAT_SECONDS):
            with suppress(CheckpointError):  # the next upload reports it
                self._lease.renew()
        with suppress(CheckpointError):
            self._lease.release()

    def _upload_newest(self) -> None:
        for _, step, path in list_step_folders(self._folder)[:1]:
            if not self._remote.has_step(path):
                self.upload(step, path)

    def _upload_loop(self) -> None:
        while True:
            with self._lock:
                request, self._next = self._next, None
                if request is None:
                    self._uploader = None
                    return
            self._upload_with_retries(*request)

    def _upload_with_retries(self, step: int, folder: Path) -> None:
        """Upload a step folder, retrying until it succeeds or a newer step waits for upload."""
        for pause in (*RETRY_SECONDS, None):
            try:
                self._lease.renew()
                self._remote.upload(folder, self._to_keep)
                self.last_uploaded = step
                return
            except Exception as error:  # the run depends only on the steps on disk
                failure = error
            if pause is None or self._next is not None or isinstance(failure, LeaseLostError):
                break
            time.sleep(pause)
        self._failure = str(failure)
        last = "none" if self.last_uploaded is None else f"step {self.last_uploaded}"
        say(f"warning: step {step} is not in the mirror, the run continues: {failure}; the last "
            f"that this run copied there is {last}")  # fmt: skip


def open_mirror(
    address: str | None, to_keep: int, folder: Path, fresh: bool
) -> CheckpointMirror | None:
    """Open the mirror of a run's checkpoints on process 0; collective.

    Arguments as for `CheckpointMirror`.

    Raises:
        CheckpointError: on all processes, if the mirror cannot be opened.
    """
    if address is None:
        return None
    return run_on_first_process(lambda: CheckpointMirror(address, to_keep, folder, fresh))
