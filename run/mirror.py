"""Copies of saved steps in an object store, made behind the run, which they never end."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from checkpoints.remote import RemoteRun
from checkpoints.save_retry import PAUSES
from terminal.screen import say


class Mirror:
    """Copies the newest of the steps that it is given, one at a time."""

    def __init__(self, address: str, to_keep: int) -> None:
        """
        Args:
            address: of the run in the store.
            to_keep: newest steps to keep there.
        """
        self._run, self._to_keep = RemoteRun(address), to_keep
        self._lock = threading.Lock()
        self._waiting: tuple[int, Path] | None = None
        self._thread: threading.Thread | None = None
        self.step: int | None = None
        """The last step that this copied."""

    def add(self, step: int, folder: Path) -> None:
        """Copy the folder of a step, in place of one that still waits; returns at once."""
        with self._lock:
            self._waiting = step, folder
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
                self._thread.start()

    def wait(self) -> None:
        """Return when nothing is left to be copied."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            say(f"copying to {self._run.address}")
            thread.join()

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
                self._run.put(folder, self._to_keep)
                self.step = step
                return
            except Exception as error:  # the steps on disk are what a run depends on
                failure = error
            if pause is None or self._waiting is not None:
                break
            time.sleep(pause)
        last = "none" if self.step is None else f"step {self.step}"
        say(f"warning: step {step} is not in the mirror, the run goes on: {failure}; the last "
            f"that this run copied there is {last}")  # fmt: skip
