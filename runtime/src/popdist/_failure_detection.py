"""Failure detection: heartbeats, closed connections, and the choice of the lost process to name.

A process that leaves after its work publishes LEFT; one that fails publishes ENDED. The connection
of a killed process is closed by the operating system; a process whose host is lost stops its
heartbeat.

All processes that exit because of a lost one increment a counter first, and only the first of them
names the lost process. It names the right one: nobody had exited because of another before. The
service handles one request at a time, so exactly one process is first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Set
from typing import Any

from popdist._process_info import SILENCE

CHECK_INTERVAL = 1.0  # seconds between looks at who is there
LEFT, ENDED = "left", "ended"  # last words, or their beginning
MAX_PAUSE = 5.0  # seconds between checks that count, at most, as silence of a peer
_MAX_READERS = 64  # processes that read all statuses every second
_LEAVE_TIMEOUT = 10.0  # seconds that a process waits in a collective for one that has left
_LOST_NAME_TIMEOUT = 5_000  # milliseconds for the first process to name the lost one
_STATUS, _NAMED = "popdist/status", "popdist/named"
_LOST_COUNT, _LOST = f"{_NAMED}/asked", f"{_NAMED}/lost"


def lost_processes(statuses: Mapping[int, str], silent_processes: Set[int]) -> set[int]:
    """Returns the indices of processes that ended or fell silent without leaving the group.

    Args:
        statuses: last published status of each process.
        silent_processes: processes whose connection was closed before the statuses were read, or
            that are silent.
    """
    left = {i for i, status in statuses.items() if status == LEFT}
    ended = {i for i, status in statuses.items() if status.startswith(ENDED)}
    return ended | (silent_processes - left)


class StatusBoard:
    """Status of each process of the run, in the coordination service's key-value store."""

    def __init__(self, client: Any, index: int) -> None:
        """Publish as process `index` through a client of the coordination service."""
        self._client, self._index = client, index

    def publish_status(self, status: str) -> None:
        """Publishes this process's status for the run's other processes."""
        self._client.key_value_set(f"{_STATUS}/{self._index:06d}", status, allow_overwrite=True)

    def statuses(self) -> dict[int, str]:
        """Returns the last published status of each process, by index."""
        entries = self._client.key_value_dir_get(_STATUS)
        return {int(key.rpartition("/")[2]): status for key, status in entries}

    def activities(self) -> dict[int, str]:
        """Returns the published activity of each process that has not ended."""
        statuses = {index: status.partition(" ") for index, status in self.statuses().items()}
        return {
            index: activity
            for index, (heartbeat, _, activity) in statuses.items()
            if heartbeat.isdigit()
        }

    def declare_lost(self, lost: int) -> int | None:
        """Publishes the lost process that makes this one exit; called once by each process.

        Returns:
            None: no other has named one before; else the process that the first has named.
        """
        if self._client.key_value_increment(_LOST_COUNT, 1) == 1:
            self._client.key_value_set(_LOST, str(lost))
            return None
        return int(self._client.blocking_key_value_get(_LOST, _LOST_NAME_TIMEOUT))

    def declared_lost(self) -> int | None:
        """Returns the lost process that another process has published; None if there is none."""
        entries = dict(self._client.key_value_dir_get(_NAMED))
        return int(entries[_LOST]) if _LOST in entries else None


class PeerMonitor:
    """Failure detector that decides which of the other processes are lost."""

    def __init__(
        self,
        count: int,
        board: StatusBoard,
        closed: Callable[[], set[int]],
        waiting_on_peers: Collection[object],
        silence_timeout: float,
        activity: Callable[[], str] = str,
    ) -> None:
        """Creates a monitor that has received no heartbeat yet.

        Args:
            count: of all processes.
            closed: returns the processes whose connection was closed since the last call.
            waiting_on_peers: not empty while this process waits in a collective.
            silence_timeout: seconds; a process that was not heard of for so long is gone.
            activity: returns what the main thread is doing, to be published.
        """
        self._activity = activity
        # All that read all are the square of the processes: of many, each reads less often.
        self._checks_per_read = 1 + count // _MAX_READERS  # looks
        self._silence = max(silence_timeout, 3 * CHECK_INTERVAL * self._checks_per_read)
        self._status_board = board
        self._find_closed = closed
        self._waiting_on_peers = waiting_on_peers
        self._last_status = dict.fromkeys(range(count), ("", 0.0))
        self._closed: set[int] = set()
        self._heartbeat = 0
        self._now = self._wait_seconds = self._last_read = 0.0  # seconds

    def failure_reason(self, process: int) -> str:
        """Returns the reason why a process counts as lost, as a phrase to follow "has"."""
        status = self._last_status[process][0]
        if status.startswith(ENDED):
            return status
        if process in self._closed or status == LEFT:
            return ENDED
        return f"not been heard of for {self._silence:.0f} s ({SILENCE})"

    def find_lost_peer(self, elapsed: float) -> int | None:
        """Publishes a heartbeat; returns the lost process that makes this one exit, if any.

        Args:
            elapsed: seconds since the last look. While this process was stopped itself, it could
                not hear the others.

        Raises:
            Exception: the service does not answer.
        """
        elapsed = min(elapsed, MAX_PAUSE)
        self._now += elapsed
        closed = self._find_closed()
        self._closed |= closed
        self._heartbeat += 1
        self._status_board.publish_status(f"{self._heartbeat} {self._activity()}".rstrip())
        if not closed and self._heartbeat % self._checks_per_read:
            return None
        statuses = (
            self._status_board.statuses()
        )  # after `_closed`: a process publishes LEFT before it ends
        for index, status in statuses.items():
            if self._last_status[index][0] != status:
                self._last_status[index] = status, self._now
        silent = {
            i for i, (_, since) in self._last_status.items() if self._now - since > self._silence
        }
        lost = lost_processes(statuses, silent | self._closed)
        left = {index for index, status in statuses.items() if status == LEFT}
        wait_seconds, self._last_read = self._now - self._last_read, self._now
        self._wait_seconds = (
            self._wait_seconds + wait_seconds if left and self._waiting_on_peers else 0.0
        )
        return min(lost or (left if self._wait_seconds > _LEAVE_TIMEOUT else ()), default=None)
