"""In whatever order things happen, one survivor names the process that is gone, and no other."""

from __future__ import annotations

import threading
from contextlib import suppress

import pytest
from jax.errors import JaxRuntimeError

from popdist._failure_detection import ENDED, LEFT, PeerMonitor, StatusBoard, lost_processes
from popdist._process_group import _is_jax_failure

VICTIM = 2


@pytest.mark.parametrize(
    ("statuses", "unheard", "expected"),
    [
        ({0: "7", 1: "7"}, {}, set()),
        ({0: "7", 1: "7"}, {1}, {1}),
        ({0: "7"}, {1}, {1}),  # was never heard of
        ({0: "7", 1: LEFT}, {1}, set()),
        ({0: "7", 1: ENDED, 2: "3"}, {}, {1}),
        ({0: LEFT, 1: ENDED, 2: "3"}, {0, 1, 2}, {1, 2}),
    ],
)
def test_with_whom_a_process_ends(statuses, unheard, expected):
    assert lost_processes(statuses, set(unheard)) == expected


GLOO = "UNKNOWN: Gloo AllGather failed: pair.cc:538] Read error: Connection reset by peer"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (JaxRuntimeError(GLOO), True),
        (JaxRuntimeError("the device is gone"), True),
        (ValueError(GLOO), True),  # of an executable that JAX runs at once
        (ValueError("a shape does not fit"), False),
        (OSError(GLOO), False),
        (JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory"), False),
        (ValueError("RESOURCE_EXHAUSTED: out of memory"), False),
    ],
)
def test_which_errors_may_come_of_a_process_that_is_gone(error, expected):
    assert _is_jax_failure(error) == expected
    later = RuntimeError("what it led to")
    later.__cause__ = error
    assert _is_jax_failure(later) == expected


class _Over(Exception):
    """The order is at its end."""


class Survivor:
    """A process with its real watcher, in a thread that stands still before each request."""

    def __init__(self, index: int, world: World) -> None:
        self._index, self._world = index, world
        self._go, self._stands = threading.Semaphore(0), threading.Semaphore(0)
        self._is_over, self._is_late, self._seen = False, False, set[int]()
        self.looks = 0
        self.read: list[object] = []
        threading.Thread(target=self._live, daemon=True).start()
        self._stands.acquire()

    def can_go(self) -> bool:
        """Its first look may come too early; until there is something to see, one is enough."""
        enough = 3 if VICTIM in self._world.closed else 2
        return self._index not in self._world.closed and self.looks < enough

    def go(self, is_late: bool) -> None:
        """Do what it stands before. Who is late hears of no connection closed since."""
        self._is_late = is_late
        self._go.release()
        self._stands.acquire()

    def forget(self) -> None:
        """End the thread."""
        self._is_over = True
        self._go.release()

    def _live(self) -> None:
        monitor = PeerMonitor(3, self, self._closed, (), 60.0)
        with suppress(_Over):
            while (lost := monitor.find_lost_peer(1.0)) is None:
                pass
            if self.declare_lost(lost) is None:
                self._world.named.append(lost)
            self._world.closed.add(self._index)
            self._stands.release()

    def _wait(self) -> None:
        self._stands.release()
        self._go.acquire()
        if self._is_over:
            raise _Over

    # ---- the board, and the connection to the service -------------------------------------------
    def publish_status(self, status: str) -> None:
        """Beats are nothing to the others, which hear each other often enough."""

    def statuses(self) -> dict[int, str]:
        self._wait()
        self.read.append(dict(self._world.statuses))
        return dict(self._world.statuses)

    def declare_lost(self, lost: int) -> int | None:
        self._wait()
        self._world.asked.append(lost)
        return None if len(self._world.asked) == 1 else self._world.asked[0]

    def _closed(self) -> set[int]:
        self.looks += 1
        self._wait()
        if not self._is_late:
            self._seen = set(self._world.closed)
        self.read.append(set(self._seen))
        return set(self._seen)


class World:
    """Two survivors, and a victim that does some of: tell that it has ended; end."""

    def __init__(self, last_words: list[str]) -> None:
        self.statuses = dict.fromkeys(range(3), "1")
        self.closed, self.named, self.asked = set[int](), list[int](), list[int]()
        self._last_words = list(last_words)
        self.survivors = [Survivor(index, self) for index in range(VICTIM)]

    def steps(self) -> list[tuple[int, bool]]:
        """Returns the possible next events: which process acts, and True if it is late."""
        able = [(i, late) for i, s in enumerate(self.survivors) if s.can_go()
                for late in ([False, True] if s.looks < 2 else [False])]  # fmt: skip
        return able + ([] if VICTIM in self.closed else [(VICTIM, False)])

    def do(self, who: int, late: bool) -> None:
        if who != VICTIM:
            self.survivors[who].go(late)
        elif self._last_words:
            self.statuses[VICTIM] = self._last_words.pop()
        else:
            self.closed.add(VICTIM)

    def state(self) -> str:
        """All that what comes next depends on."""
        seen = [(s.looks, s.read) for s in self.survivors]
        return repr((self.statuses, sorted(self.closed), self.named, self.asked, seen))


@pytest.mark.parametrize(
    ("last_words", "named"),
    [([], [VICTIM]), ([ENDED], [VICTIM]), ([LEFT], [])],
    ids=["killed", "failed", "left"],
)
def test_all_orders_of_three_processes(last_words, named):
    """Each order of all steps, as far as it leads to something new."""
    known: set[str] = set()
    beginnings: list[list[tuple[int, bool]]] = [[]]
    for begin in beginnings:
        world, done = World(last_words), []
        while steps := world.steps():
            step = steps[0]
            if len(done) < len(begin):
                step = begin[len(done)]
            elif (state := world.state()) not in known:
                known.add(state)
                beginnings += [[*done, other] for other in steps[1:]]
            world.do(*step)
            done.append(step)
        for survivor in world.survivors:
            survivor.forget()
        assert world.named == named, done
        assert world.closed == ({0, 1, VICTIM} if named else {VICTIM}), done
    assert len(beginnings) > 100


class Counting:
    """A board on which process 5 has ended."""

    def __init__(self) -> None:
        self.beats = self.reads = 0

    def publish_status(self, status: str) -> None:
        self.beats += 1

    def statuses(self) -> dict[int, str]:
        self.reads += 1
        return {i: ENDED if i == 5 else str(self.beats) for i in range(1024)}


def test_many_processes_read_the_board_less_often():
    """With 1,024 processes, reading all statuses every second would keep the service busy; a closed
    connection is still noticed at the next check."""
    board, closed = Counting(), [set(), set(), {5}]
    monitor = PeerMonitor(1024, board, lambda: closed.pop(0) if closed else set(), (), 60.0)
    assert [monitor.find_lost_peer(1.0) for _ in range(3)] == [None, None, 5]
    assert (board.beats, board.reads) == (3, 1)
    board = Counting()
    monitor = PeerMonitor(1024, board, set, (), 60.0)
    found = [monitor.find_lost_peer(1.0) for _ in range(34)]
    assert (board.beats, board.reads) == (34, 2)
    assert found.index(5) <= 20  # seconds, besides those of silence


class Service:
    """A coordination service that refuses to change a key, unless it is asked to, as JAX's does."""

    def __init__(self) -> None:
        self.words: dict[str, str] = {}

    def key_value_set(self, key: str, status: str, allow_overwrite: bool = False) -> None:
        if key in self.words and not allow_overwrite:
            raise JaxRuntimeError(f"ALREADY_EXISTS: {key}")
        self.words[key] = status

    def key_value_increment(self, key: str, by: int) -> int:
        self.words[key] = str(int(self.words.get(key, 0)) + by)
        return int(self.words[key])

    def blocking_key_value_get(self, key: str, milliseconds: int) -> str:
        return self.words[key]

    def key_value_dir_get(self, folder: str) -> list[tuple[str, str]]:
        return [(key, status) for key, status in self.words.items() if key.startswith(f"{folder}/")]


def test_a_word_on_the_board_replaces_the_one_before():
    service = Service()
    for index, words in ((0, "123"), (11, "4")):
        for status in words:
            StatusBoard(service, index).publish_status(status)
    assert StatusBoard(service, 5).statuses() == {0: "3", 11: "4"}


def test_the_others_learn_whom_the_first_has_named():
    """A process that was paused learns that it was declared lost itself."""
    service = Service()
    assert [StatusBoard(service, i).declare_lost(lost) for i, lost in ((0, 1), (2, 1), (1, 0))] == [
        None,
        1,
        1,
    ]


class Told:
    """A board on which all tell something new at each look but process 1, which is paused."""

    def __init__(self, count: int) -> None:
        self._count, self._heartbeat = count, 0

    def publish_status(self, status: str) -> None:
        self._heartbeat += 1

    def statuses(self) -> dict[int, str]:
        return {i: "paused" if i == 1 else str(self._heartbeat) for i in range(self._count)}


@pytest.mark.parametrize(("count", "seconds"), [(2, 8), (1024, 51)])
def test_a_process_may_be_silent_for_as_long_as_is_given(count, seconds):
    """With many processes for three readings of the board, else those would take living ones for
    gone."""
    monitor = PeerMonitor(count, Told(count), set, (), 8.0)
    lost = next(check for check in range(1, 200) if monitor.find_lost_peer(1.0) == 1)
    assert seconds < lost <= seconds + 2 * (1 + count // 64)
    assert monitor.failure_reason(1) == f"not been heard of for {seconds} s (POPDIST_SILENCE)"
