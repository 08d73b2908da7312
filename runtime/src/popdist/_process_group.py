"""The processes that work together: they meet, exchange small values, and notice who is missing.

All of it goes through the coordination service of JAX's distributed runtime, which also serves as
the meeting point for the devices' collectives.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from popdist import _coordination_service
from popdist._coordinator_monitor import Overseer, end_saying, is_launched
from popdist._failure_detection import ENDED, LEFT, LOOK, Board, Watcher
from popdist._gpu_assignment import devices_of, visible_gpus
from popdist._handshake import address_among, knock, own_address
from popdist._process_info import SECRET, SILENCE, DistributedError, Place
from popdist._relay import Relay
from popdist._rpc_stats import Counted, Traffic
from popdist._stdout_filter import QuietOutput

MEETING = 120  # seconds that all processes have to come
PATIENCE = 10.0  # seconds that process 0 waits at its end for the others to end
_AGREEING = 3.0  # seconds that a process which fails waits for others that fail alike
_ANSWER = 20.0  # seconds that a process which ends because of another waits for the service
_LOOKS = 5  # of others at one that is silent, and of this process at them
_PARTING = 60  # seconds for the service to hear that a process parts
_SAID, _ALL = "popdist/said", "popdist/all"
_STATUS = re.compile(r"([A-Z_]{5,}): ")  # of XLA, before what has failed
_NEVER = 7 * 24 * 3600  # seconds: `_watch` ends who waits for a process that is gone


class Group:
    """This process among the others. Made once, by `popdist.init`."""

    def __init__(self, place: Place) -> None:
        """Meet the others.

        Raises:
            DistributedError: they do not come, or JAX has started its devices already.
        """
        self.index, self.count = place.index, place.count
        self._rounds: Counter[str] = Counter()
        self._counting = threading.Lock()
        self._leaving = threading.Event()
        self._needing: set[object] = set()
        self._failed: float | None = None  # when something failed that needs the others
        self._server: subprocess.Popen[str] | None = None
        self._alone = threading.Event()  # set when process 0 is the only one left
        self._words = b""  # a part of one from the door
        self.working = ""  # what this process does
        self._silence = place.silence
        _coordination_service.raise_descriptors()  # collectives connect each process to each other
        client, reached = self._connect(place)
        self._client, watching = Counted(client), Counted(client)
        self._board = Board(watching, self.index)
        self._counted = {"exchange": self._client, "watch": watching}
        mine = [socket.gethostname(), os.getpid(), visible_gpus(), reached, self._silence]
        gathered = self.gather(mine, "members")
        self._silence = self._overseer.limit = gathered[0][4]  # process 0's holds for all
        self.members: list[Any] = [one[:3] for one in gathered]
        self.neighbours = sum(host == mine[0] for host, _, _ in self.members)
        self._choose_devices()
        _let_gloo_use(client, address_among(self.index, [one[3] for one in gathered]))
        self._output = QuietOutput()
        self._watcher = threading.Thread(target=self._watch, name="popdist", daemon=True)
        self._watcher.start()
        atexit.register(self.leave)
        self._usual_hook = sys.excepthook
        sys.excepthook = self._uncaught

    # ---- meeting --------------------------------------------------------------------------------
    def _connect(self, place: Place) -> tuple[Any, str | None]:
        """The client of JAX's service, and the address at which this process was seen."""
        from jax._src import clusters, distributed, xla_bridge
        from jax._src.lib import _jax

        if xla_bridge.backends_are_initialized():
            raise DistributedError(
                "JAX has started its devices before this process met the others: call "
                "popdist.init() first"
            )
        coordinator = place.coordinator
        if coordinator is None:
            find = clusters.ClusterEnv.auto_detect_unset_distributed_params
            detected = find(None, place.count, place.index, [], None, MEETING)[0]
            # JAX's port is that of the job, in which several runs may meet.
            coordinator = detected and f"{detected.rpartition(':')[0]}:{place.port}"
        if coordinator is None:
            raise DistributedError(
                "nobody says where the processes meet: give --coordinator HOST:PORT, or set "
                "POPDIST_COORDINATOR"
            )
        host, _, port = coordinator.rpartition(":")
        if place.index == 0:
            self._serve(host.strip("[]"), int(port), place)
        address = host.strip("[]"), int(port)
        self._lifeline = knock(*address, place, _coordination_service.LIFELINE, MEETING)
        self._lifeline.setblocking(False)
        try:
            service = knock(*address, place, _coordination_service.SERVICE, MEETING)
            client = _jax.get_distributed_runtime_client(
                Relay(service).address, place.index, init_timeout=MEETING,
                shutdown_timeout=_PARTING, heartbeat_timeout=_NEVER, use_compression=True,
            )  # fmt: skip
            client.connect()
        except Exception as error:
            raise DistributedError(
                f"process {place.index} did not meet all of the {place.count} processes at "
                f"{coordinator} within {MEETING} s: start each with an index of its own, and the "
                "same coordinator"
            ) from error
        who = f"process {place.index} of {place.count}"
        self._overseer = Overseer(self._lifeline, who, coordinator, self._silence)
        state = distributed.global_state
        state.client, state.coordinator_address = client, coordinator
        state.process_id, state.num_processes = place.index, place.count
        return client, own_address(host.strip("[]"), int(port))

    def _serve(self, host: str, port: int, place: Place) -> None:
        """Start the coordination service, at the coordinator's address."""
        command = [sys.executable, str(Path(_coordination_service.__file__))]
        # What a signal to everything does before the service can say that it heeds none.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _coordination_service.SIGNALS)
        try:
            self._server = subprocess.Popen(
                [*command, host, str(port), str(self.count), place.run],
                env=os.environ | {SECRET: place.secret, SILENCE: str(self._silence)},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                text=True, start_new_session=True,
            )  # fmt: skip
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        assert self._server.stdout is not None
        said = self._server.stdout.readline().strip()
        if said != "ready":
            raise DistributedError(
                f"the processes cannot meet at port {port} of {host}: "
                f"{said or 'the service ended'}; give another --coordinator"
            )
        threading.Thread(target=self._read_notes, name="door", daemon=True).start()

    def _read_notes(self) -> None:
        """Say whom the service has refused, until it says no more."""
        assert self._server is not None
        assert self._server.stdout is not None
        for line in self._server.stdout:
            with suppress(OSError, ValueError):
                print(f"note: {line.strip()}, at the coordinator's port", file=sys.stderr)
        self._alone.set()

    def _ended(self) -> set[int]:
        """The processes that have ended since this was asked last, in whatever way."""
        with suppress(OSError):  # there are none
            self._words += self._lifeline.recv(self.count * _coordination_service.WORD)
        whole = len(self._words) // _coordination_service.WORD * _coordination_service.WORD
        words, self._words = self._words[:whole], self._words[whole:]
        ended = {
            int.from_bytes(words[i : i + _coordination_service.WORD])
            for i in range(0, whole, _coordination_service.WORD)
        }
        return ended & set(range(self.count))

    def _choose_devices(self) -> None:
        import jax

        given = os.environ.get("JAX_LOCAL_DEVICE_IDS")
        devices = devices_of(self.index, [(host, gpus) for host, _, gpus in self.members])
        chosen = given or ",".join(map(str, devices or ()))
        if chosen:
            jax.config.update("jax_cuda_visible_devices", chosen)

    # ---- exchange -------------------------------------------------------------------------------
    def gather(self, value: Any, channel: str = "main") -> list[Any]:
        """Every process's value, in order; all processes call it, as often as each other.

        Args:
            value: what JSON can hold.
            channel: calls of one channel meet; use one for each thread.
        """
        with self._counting:
            turn = self._rounds[channel]
            self._rounds[channel] += 1
        # Two names, which the service keeps: all have read one before any writes it again, for in
        # between they all have met at the other.
        here, client = f"popdist/{channel}/{turn % 2}", self._client
        mine = json.dumps(value)
        client.key_value_set(f"{here}/{self.index:06d}", mine, allow_overwrite=True)
        with self.together(), self._in_need():
            client.wait_at_barrier(f"popdist/{channel}", _NEVER * 1000)
            # The service takes time for each value that it looks up: one process asks for all.
            if self.index:
                text = client.blocking_key_value_get(f"{_ALL}/{channel}/{turn}", _NEVER * 1000)
            else:
                text = f"[{','.join(v for _, v in sorted(client.key_value_dir_get(here)))}]"
                client.key_value_set(f"{_ALL}/{channel}/{turn}", text)
                client.key_value_delete(f"{_ALL}/{channel}/{turn - 1}")  # all have read it
        values: list[Any] = json.loads(text)
        return values

    def traffic(self) -> dict[str, Traffic]:
        """What this process has asked of the service, for exchange and to watch the others."""
        return {what: counted.traffic for what, counted in self._counted.items()}

    # ---- who is there ---------------------------------------------------------------------------
    def others_work(self) -> dict[str, str]:
        """What each other process says that it does; by the process in words.

        The service may be busy, or hang: to be called by a thread that may.
        """
        told = self._board.work()
        return {
            f"process {i} (pid {pid} on {host})": told[i]
            for i, (host, pid, _) in enumerate(self.members)
            if i in told and i != self.index
        }

    def _watch(self) -> None:
        """Look who is there, again and again, and end this process with one that is gone."""
        watcher = Watcher(
            self.count,
            self._board,
            self._ended,
            self._needing,
            self._silence,
            lambda: self.working,
        )
        before = time.monotonic()
        while not self._leaving.wait(LOOK):
            passed, before = time.monotonic() - before, time.monotonic()
            try:
                lost = watcher.look(passed)
            except Exception:  # a busy service
                continue
            self._overseer.hear()
            if lost is not None:
                self._end_with(lost, watcher.fate(lost))

    def _end_with(self, lost: int, fate: str) -> NoReturn:
        """End this process because another is gone. The first that does so names it; one that the
        first has named, since it had been silent, says that."""
        text = f"{self._in_words(lost)} has {fate}, and the others end with it"
        if is_launched():  # the launcher says it
            text = ""
        unanswered = threading.Timer(_ANSWER, end_saying, [text])
        unanswered.daemon = True
        unanswered.start()
        try:
            named = self._board.name(lost)
        except Exception:  # better twice than never
            named = None
        self._end_if_given_up(named)
        end_saying(text if named is None else "")

    def _end_if_given_up(self, named: int | None) -> None:
        """End this process if it is the one that the others have named, since it was silent."""
        if named == self.index:
            silent = (
                f"the others have not heard of {self._in_words(self.index)} for {self._silence} s "
                f"({SILENCE}), and have ended"
            )
            end_saying("" if is_launched() else silent)

    def _in_words(self, index: int) -> str:
        host, pid, _ = self.members[index]
        return f"process {index} of {self.count} (pid {pid} on {host})"

    @contextmanager
    def together(self) -> Iterator[None]:
        """Work that needs the others. If it fails since one is gone, this process ends with it."""
        try:
            yield
        except Exception as error:
            self._await_loss(error)
            raise

    def _await_loss(self, error: BaseException) -> None:
        """Wait for the watcher to end this process, if an error may come of a process gone."""
        if not _comes_of_jax(error):
            return
        if self._failed is None:
            self._failed = time.monotonic()
        with self._in_need():
            time.sleep(max(self._failed + self._silence + _LOOKS * LOOK - time.monotonic(), 0.0))

    @contextmanager
    def _in_need(self) -> Iterator[None]:
        """What this thread cannot end unless all others are there."""
        token = object()
        self._needing.add(token)
        try:
            yield
        finally:
            self._needing.discard(token)

    # ---- the end --------------------------------------------------------------------------------
    def leave(self) -> None:
        """Part from the others, who may go on. Process 0 waits for them a while."""
        if self._leaving.is_set():
            return
        with suppress(Exception):  # the service may be gone
            self._end_if_given_up(self._board.lost())  # while it was stopped
        self._stop_listening(LEFT)
        with suppress(Exception):  # the service may be gone
            self._client.shutdown()
        if self._server is not None:
            assert self._server.stdin is not None
            with suppress(OSError):
                self._server.stdin.write("bye\n")
                self._server.stdin.flush()
            # The service needs no process 0, but where this is all there is in a container, the
            # service ends with it, and JAX aborts those who are still there.
            self._alone.wait(PATIENCE)
        self._output.close()

    def fail(self, text: str, code: int) -> NoReturn:
        """Say what is wrong, unless a process before this one says the same; then end."""
        said: dict[int, str] = {}
        with suppress(Exception):  # the service may be gone
            self._client.key_value_set(f"{_SAID}/{self.index:06d}", json.dumps(text))
            end = time.monotonic() + _AGREEING
            while len(said) < self.count and time.monotonic() < end:
                entries = self._client.key_value_dir_get(_SAID)
                said = {int(k.rpartition("/")[2]): json.loads(t) for k, t in entries}
                time.sleep(0.05)
        if all(said.get(i) != text for i in range(self.index)):
            with suppress(OSError):
                print(text, file=sys.stderr, flush=True)
        self.end(code)

    def end(self, code: int) -> NoReturn:
        """End this process at once. The others notice, and end too."""
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        self._stop_listening(f"{ENDED} with code {code}")
        os._exit(code)

    def _stop_listening(self, word: str) -> None:
        """Tell the others how this process ends, and no longer look for them."""
        from jax._src import distributed

        self._leaving.set()
        self._watcher.join()  # before the interpreter ends, which must not find it in an RPC
        distributed.global_state.client = None
        self._overseer.hear()
        with suppress(Exception):  # the service may be gone
            self._board.tell(word)
        self._overseer.stop()

    def _uncaught(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, Exception):
            self._await_loss(error)
        self._usual_hook(kind, error, trace)
        self.end(1)


def _comes_of_jax(error: BaseException | None) -> bool:
    """Whether an error, or one that led to it, is a failure of devices or of the service.

    Where JAX runs an executable or a copy at once, it raises such a failure as a `ValueError`.
    """
    from jax.errors import JaxRuntimeError

    while error is not None:
        status = _STATUS.match(str(error))
        if isinstance(error, JaxRuntimeError) or (isinstance(error, ValueError) and status):
            # What a process has run out of is its own.
            return status is None or status[1] != "RESOURCE_EXHAUSTED"
        error = error.__cause__ or error.__context__
    return False


def _let_gloo_use(client: Any, address: str | None) -> None:
    """Let collectives on CPU listen on the address by which a process reaches the others.

    By default gloo takes what the host's name stands for, which may be another interface, or
    127.0.1.1 on a Debian.
    """
    from jax._src import xla_bridge
    from jax._src.lib import _jax

    def make() -> Any:
        return xla_bridge.make_cpu_client(_jax.make_gloo_tcp_collectives(client, address))

    xla_bridge.register_backend_factory("cpu", make, priority=0, fail_quietly=False)
