"""Who of the processes is still there, and which one the others end with.

A process that leaves after its work says so, and one that fails says that it has ended. One that is
killed says nothing, but the system closes its connection; one whose host is gone falls silent.

Those who end because of another all come to the board first, and only the first of them names it.
That is the right one: nobody has ended because of another before. The service serves one request
after the other, so there is one first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Set
from typing import Any

from popdist._process_info import SILENCE

LOOK = 1.0  # seconds between looks at who is there
LEFT, ENDED = "left", "ended"  # last words, or their beginning
PAUSE = 5.0  # seconds between looks, at most, that count as silence of others
_READERS = 64  # processes that read each second what all have told
_LEAVING = 10.0  # seconds that a process waits for one that has left: one of them is wrong
_MOMENT = 5_000  # milliseconds between the first who names a process and its name
_STATUS, _NAMED = "popdist/status", "popdist/named"
_ASKED, _LOST = f"{_NAMED}/asked", f"{_NAMED}/lost"


def gone(told: Mapping[int, str], unheard: Set[int]) -> set[int]:
    """The processes that have not left, and are no longer there.

    Args:
        told: the last word of each process.
        unheard: those whose connection is closed, seen before the words, or that are silent.
    """
    left = {i for i, word in told.items() if word == LEFT}
    ended = {i for i, word in told.items() if word.startswith(ENDED)}
    return ended | (unheard - left)


class Board:
    """Where each process tells how it is, for all to read: keys of the coordination service."""

    def __init__(self, client: Any, index: int) -> None:
        """Args: `client`: of the coordination service; `index`: which process this is."""
        self._client, self._index = client, index

    def tell(self, word: str) -> None:
        """Let the others read a word about this process."""
        self._client.key_value_set(f"{_STATUS}/{self._index:06d}", word, allow_overwrite=True)

    def told(self) -> dict[int, str]:
        """What each process has told last."""
        entries = self._client.key_value_dir_get(_STATUS)
        return {int(key.rpartition("/")[2]): word for key, word in entries}

    def work(self) -> dict[int, str]:
        """What each process that lives says that it does."""
        words = {index: word.partition(" ") for index, word in self.told().items()}
        return {index: work for index, (beat, _, work) in words.items() if beat.isdigit()}

    def name(self, lost: int) -> int | None:
        """Name the process because of which this one ends; each that does so asks once.

        Returns:
            None: no other has named one before; else the process that the first has named.
        """
        if self._client.key_value_increment(_ASKED, 1) == 1:
            self._client.key_value_set(_LOST, str(lost))
            return None
        return int(self._client.blocking_key_value_get(_LOST, _MOMENT))

    def lost(self) -> int | None:
        """Return the process because of which others have ended."""
        entries = dict(self._client.key_value_dir_get(_NAMED))
        return int(entries[_LOST]) if _LOST in entries else None


class Watcher:
    """What this process knows of the others."""

    def __init__(
        self,
        count: int,
        board: Board,
        closed: Callable[[], set[int]],
        needing: Collection[object],
        silence: float,
        work: Callable[[], str] = str,
    ) -> None:
        """Know nothing yet.

        Args:
            count: of all processes.
            closed: gives those whose connection was closed since it was asked last.
            needing: not empty while this process can do nothing without all the others.
            silence: seconds; a process that was not heard of for so long is gone.
            work: gives what its main thread does, for the others to read.
        """
        self._work = work
        # All that read all are the square of the processes: of many, each reads less often.
        self._every = 1 + count // _READERS  # looks
        self._silence = max(silence, 3 * LOOK * self._every)
        self._board, self._find_closed, self._needing = board, closed, needing
        self._heard = dict.fromkeys(range(count), ("", 0.0))
        self._closed: set[int] = set()
        self._beat = 0
        self._now = self._waited = self._read = 0.0  # seconds

    def fate(self, index: int) -> str:
        """What has become of a process that `look` returned, after "has"."""
        word = self._heard[index][0]
        if word.startswith(ENDED):
            return word
        if index in self._closed or word == LEFT:
            return ENDED
        return f"not been heard of for {self._silence:.0f} s ({SILENCE})"

    def look(self, passed: float) -> int | None:
        """Tell the others that this process lives, and return the one it must end with, if any.

        Args:
            passed: seconds since the last look. While this process was stopped itself, it could
                not hear the others.

        Raises:
            Exception: the service does not answer.
        """
        passed = min(passed, PAUSE)
        self._now += passed
        closed = self._find_closed()
        self._closed |= closed
        self._beat += 1
        self._board.tell(f"{self._beat} {self._work()}".rstrip())
        if not closed and self._beat % self._every:
            return None
        told = self._board.told()  # after `_closed`: who leaves tells so before it ends
        for index, word in told.items():
            if self._heard[index][0] != word:
                self._heard[index] = word, self._now
        silent = {i for i, (_, since) in self._heard.items() if self._now - since > self._silence}
        lost = gone(told, silent | self._closed)
        left = {index for index, word in told.items() if word == LEFT}
        waited, self._read = self._now - self._read, self._now
        self._waited = self._waited + waited if left and self._needing else 0.0
        return min(lost or (left if self._waited > _LEAVING else ()), default=None)
