"""Copies of saved steps in an object store, made behind the run, which they never end."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

from checkpoints.collective_io import PAUSES, on_first_process
from checkpoints.errors import CheckpointError
from checkpoints.owner import BEAT, Owner, TakenError, claim
from checkpoints.remote import RemoteRun
from checkpoints.step_folders import step_folders
from files.formatting import format_path
from terminal.interrupts import Interrupted
from terminal.screen import say

PATIENCE = 300.0
"""Seconds that the end of a run waits for a store that takes nothing."""
PATIENCE_AFTER_SIGNAL = 30.0
"""The same, where a signal has asked for the end."""
_PARTING = 5.0  # seconds for the store to hear that the run has ended


class Mirror:
    """Copies the newest of the steps that it is given, one at a time.

    As a context it owns the address. Its end waits for the last copy.
    """

    def __init__(self, address: str, to_keep: int, folder: Path, fresh: bool = False) -> None:
        """Claim the address.

        Args:
            address: of the run in the store.
            to_keep: newest steps to keep there.
            folder: of the run, which the caller has locked.
            fresh: the run begins anew. Else its newest step is copied, if it is not there yet.

        Raises:
            CheckpointError: the store refuses, or has another run.
        """
        self._run, self._to_keep, self._folder = RemoteRun(address), to_keep, folder
        self._owner: Owner = claim(folder, self._run, fresh)
        self._lock = threading.Lock()
        self._waiting: tuple[int, Path] | None = None
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self._beats = threading.Thread(target=self._beat, name="mirror's owner", daemon=True)
        self._failure = ""
        self._wanted: int | None = None  # the last step that is to be there
        self.signalled = False
        """A signal has asked for the end of the run."""
        self.step: int | None = None
        """The last step that is known to be there."""
        if not fresh:
            self._add_newest()

    def add(self, step: int, folder: Path) -> None:
        """Copy the folder of a step, in place of one that still waits; returns at once."""
        with self._lock:
            self._waiting, self._wanted = (step, folder), step
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
                self._thread.start()

    def remove(self) -> None:
        """Delete the run in the store. Raises CheckpointError."""
        self._run.remove()

    def wait(self) -> None:
        """Return when nothing is left to be copied, or the store takes nothing for too long."""
        with self._lock:
            thread = self._thread
        if thread is None:
            return
        say(f"copying to {self._run.address}")
        patience, begun = PATIENCE_AFTER_SIGNAL if self.signalled else PATIENCE, time.monotonic()
        while thread.is_alive():
            thread.join(0.1)
            if time.monotonic() - max(begun, self._run.moved) > patience:
                self._failure = f"it has taken nothing for {patience:.0f} s"
                return

    @property
    def problem(self) -> str | None:
        """Why the last step is not there, for people; None: it is."""
        if self.step == self._wanted:
            return None
        last = "none" if self.step is None else f"step {self.step}"
        return (
            f"step {self._wanted} is not in {format_path(self._run.address)} ({self._failure}), "
            f"the last that this run copied there is {last}; it is in {format_path(self._folder)}: "
            "the same command copies it"
        )

    def __enter__(self) -> Self:
        self._beats.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None or not issubclass(kind, Interrupted):
                self.wait()
        finally:
            self._ended.set()
            self._beats.join(_PARTING)

    # ---- threads --------------------------------------------------------------------------------
    def _beat(self) -> None:
        """Show that this run lives, and at last that it has ended."""
        while not self._ended.wait(BEAT):
            with suppress(CheckpointError):  # the next copy says it
                self._owner.renew()
        with suppress(CheckpointError):
            self._owner.release()

    def _add_newest(self) -> None:
        for _, step, path in step_folders(self._folder)[:1]:
            if not self._run.has(path):
                self.add(step, path)

    def _work(self) -> None:
        while True:
            with self._lock:
                due, self._waiting = self._waiting, None
                if due is None:
                    self._thread = None
                    return
            self._copy(*due)

    def _copy(self, step: int, folder: Path) -> None:
        """Copy a step; try again where that fails, unless a later one waits."""
        for pause in (*PAUSES, None):
            try:
                self._owner.renew()
                self._run.put(folder, self._to_keep)
                self.step = step
                return
            except Exception as error:  # the steps on disk are what a run depends on
                failure = error
            if pause is None or self._waiting is not None or isinstance(failure, TakenError):
                break
            time.sleep(pause)
        self._failure = str(failure)
        last = "none" if self.step is None else f"step {self.step}"
        say(f"warning: step {step} is not in the mirror, the run goes on: {failure}; the last "
            f"that this run copied there is {last}")  # fmt: skip


def mirror_of(address: str | None, to_keep: int, folder: Path, fresh: bool) -> Mirror | None:
    """The mirror of a run, on process 0; arguments as for `Mirror`. All processes call this.

    Raises:
        CheckpointError: on all processes, if it cannot be had.
    """
    if address is None:
        return None
    return on_first_process(lambda: Mirror(address, to_keep, folder, fresh))
