"""Monitor thread that exits this process when the coordination service or the launcher is gone.

It sends no requests to the service, so that a hung service cannot block it.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import NoReturn

from popdist._failure_detection import CHECK_INTERVAL, MAX_PAUSE
from popdist._process_info import SILENCE

LAUNCHER = "POPDIST_LAUNCHER"
PEER_LOST = 1  # exit code
FOLLOWED_PEER = 113  # the same, to the launcher, which looks for the process that ended first
_GONE = select.POLLRDHUP | select.POLLHUP | select.POLLERR


def is_started_by_launcher() -> bool:
    """True if `popdist.run` started this process and reads its exit code."""
    return os.environ.get(LAUNCHER) == str(os.getppid())


def exit_with_message(message: str) -> NoReturn:
    """Exits this process; `message`, unless empty, is its last line on standard error."""
    if message:
        with suppress(OSError, ValueError):  # nobody reads, or it is closed
            print(f"error: {message}", file=sys.stderr, flush=True)
    os._exit(FOLLOWED_PEER if is_started_by_launcher() else PEER_LOST)


class CoordinatorMonitor:
    """A thread that exits this process when the coordination service has been silent too long."""

    def __init__(
        self, lifeline: socket.socket, process_name: str, address: str, silence_timeout: float
    ) -> None:
        """Starts the monitor thread.

        Args:
            lifeline: a connection to the service.
            process_name: of this process, for messages.
            address: the service's address.
            silence_timeout: seconds after which it is gone.
        """
        self._process_name = process_name
        self._service = f"the service at {address}, where the processes meet,"
        self._silent_seconds, self.limit = 0.0, silence_timeout  # seconds
        self._launched = is_started_by_launcher()
        self._lifeline = select.poll()
        self._lifeline.register(lifeline, select.POLLRDHUP)
        self._stopped = threading.Event()
        threading.Thread(target=self._exit_when_silent, name="overseer", daemon=True).start()

    def reset_timeout(self) -> None:
        """Restarts the silence timeout, because the coordination service has answered."""
        self._silent_seconds = 0.0

    def stop(self) -> None:
        """Stops the monitor thread."""
        self._stopped.set()

    def _exit_when_silent(self) -> None:
        previous = time.monotonic()
        while not self._stopped.wait(CHECK_INTERVAL):
            # A process that was paused could not receive anything from the service.
            elapsed, previous = time.monotonic() - previous, time.monotonic()
            self._silent_seconds += min(elapsed, MAX_PAUSE)
            if self._launched and not is_started_by_launcher():
                exit_with_message("popdist.run has ended, and so does this process")
            if any(events & _GONE for _, events in self._lifeline.poll(0)):
                exit_with_message(
                    f"{self._service} has ended, and {self._process_name} ends with it"
                )
            if self._silent_seconds > self.limit:
                exit_with_message(
                    f"{self._service} has not answered for {self._silent_seconds:.0f} s "
                    f"({SILENCE}), and {self._process_name} ends with it"
                )
