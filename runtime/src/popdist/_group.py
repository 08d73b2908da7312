"""The processes that work together: they meet, exchange small values, and notice who is missing.

All of it goes through the coordination service of JAX's distributed runtime, which also serves as
the meeting point for the devices' collectives.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import select
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

from popdist import _service
from popdist._place import LOOPBACK, DistributedError, Place, devices_of, visible_gpus
from popdist._stdout import QuietOutput

SILENCE = 30.0  # seconds; a process that was not heard of for so long is gone
MEETING = 120  # seconds that all processes have to come
LAUNCHER = "POPDIST_LAUNCHER"
PATIENCE = 10.0  # seconds that process 0 waits at its end for the others to end
PEER_LOST = 1  # exit code
_LOOK = 1.0  # seconds between looks at who is there
_PAUSE = 5.0  # seconds between looks, at most, that count as silence of others
_LEAVING = 10.0  # seconds that a process waits for one that has left: one of them is wrong
_AGREEING = 3.0  # seconds that a process which fails waits for others that fail alike
_PARTING = 60  # seconds for the service to hear that a process parts
_LIFELINES = "popdist/lifelines"
_SAID, _STATUS = "popdist/said", "popdist/status"
_LEFT, _ENDED, _FOLLOWED = "left", "ended", "followed"  # what a process tells last
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
        self._leaving = threading.Event()
        self._left: set[int] = set()
        self._waiting = False  # for all others, some of which may have left
        self._server: subprocess.Popen[str] | None = None
        self._client = self._connect(place)
        mine = [socket.gethostname(), os.getpid(), visible_gpus(os.environ, _device_files())]
        self.members: list[Any] = self.gather(mine, "members")
        self.neighbours = sum(host == mine[0] for host, _, _ in self.members)
        self._choose_devices()
        self._output = QuietOutput()
        self._watcher = threading.Thread(target=self._watch, name="popdist", daemon=True)
        self._watcher.start()
        atexit.register(self.leave)
        self._usual_hook = sys.excepthook
        sys.excepthook = self._uncaught

    # ---- meeting --------------------------------------------------------------------------------
    def _connect(self, place: Place) -> Any:
        from jax._src import clusters, distributed, xla_bridge
        from jax._src.lib import _jax

        if xla_bridge.backends_are_initialized():
            raise DistributedError(
                "JAX has started its devices before this process met the others: call "
                "popdist.init() first"
            )
        address = place.coordinator
        if address is None:
            find = clusters.ClusterEnv.auto_detect_unset_distributed_params
            address = find(None, place.count, place.index, [], None, MEETING)[0]
        if address is None:
            raise DistributedError(
                "nobody says where the processes meet: give --coordinator HOST:PORT, or set "
                "POPDIST_COORDINATOR"
            )
        host, _, port = address.rpartition(":")
        lifelines = self._serve(host.strip("[]"), int(port)) if place.index == 0 else None
        client = _jax.get_distributed_runtime_client(
            address, place.index, init_timeout=MEETING, shutdown_timeout=_PARTING,
            heartbeat_timeout=_NEVER, use_compression=True,
        )  # fmt: skip
        try:
            client.connect()
        except Exception as error:
            raise DistributedError(
                f"process {place.index} did not meet all of the {place.count} processes at "
                f"{address} within {MEETING} s: start each with an index of its own, and the same "
                "coordinator"
            ) from error
        self._hold_lifeline(client, host.strip("[]"), lifelines)
        state = distributed.global_state
        state.client, state.coordinator_address = client, address
        state.process_id, state.num_processes = place.index, place.count
        _let_gloo_use(client, _own_address(host.strip("[]"), int(port)))
        return client

    def _serve(self, host: str, port: int) -> int:
        """Start the coordination service; on this machine alone if that is where all are.

        Returns:
            The port of its lifelines.
        """
        bound = host if host in (LOOPBACK, "localhost") else "[::]"
        command = [sys.executable, str(Path(_service.__file__))]
        self._server = subprocess.Popen(
            [*command, bound, str(port), str(self.count)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            start_new_session=True,
        )  # fmt: skip
        assert self._server.stdout is not None
        said = self._server.stdout.readline().strip()
        word, _, lifelines = said.partition(" ")
        if word != "ready":
            raise DistributedError(
                f"the processes cannot meet at port {port} of {host}: "
                f"{said or 'the service ended'}; give another --coordinator"
            )
        return int(lifelines)

    def _hold_lifeline(self, client: Any, host: str, port: int | None) -> None:
        """Keep the service alive until this process has ended, in whatever way.

        Args:
            port: where the service takes lifelines, which process 0 knows.
        """
        if port is not None:
            client.key_value_set(_LIFELINES, str(port))
        found = client.blocking_key_value_get(_LIFELINES, MEETING * 1000)
        self._lifeline = socket.create_connection((host, int(found)), timeout=MEETING)
        self._lifeline.send(self.index.to_bytes(_service.WORD))
        self._lifeline.setblocking(False)

    def _ended(self) -> set[int]:
        """The processes that have ended since this was asked last, in whatever way."""
        try:
            words = self._lifeline.recv(self.count * _service.WORD)
        except OSError:  # there are none
            return set()
        each = range(0, len(words), _service.WORD)
        return {int.from_bytes(words[i : i + _service.WORD]) for i in each}

    def _choose_devices(self) -> None:
        import jax

        given = os.environ.get("JAX_LOCAL_DEVICE_IDS")
        found = devices_of(self.index, [(host, gpus) for host, _, gpus in self.members])
        chosen = given or ",".join(map(str, found or ()))
        if chosen:
            jax.config.update("jax_cuda_visible_devices", chosen)

    # ---- exchange -------------------------------------------------------------------------------
    def gather(self, value: Any, channel: str = "main") -> list[Any]:
        """Every process's value, in order; all processes call it, as often as each other.

        Args:
            value: what JSON can hold.
            channel: calls of one channel meet; use one for each thread.
        """
        number = self._rounds[channel]
        self._rounds[channel] += 1
        here = f"popdist/{channel}/{number}"
        self._client.key_value_set(f"{here}/{self.index:06d}", json.dumps(value))
        self._waiting = True
        self._client.wait_at_barrier(here, _NEVER * 1000)
        self._waiting = False
        found = self._client.key_value_dir_get(here)
        if self.index == 0 and number:  # everybody has read the round before
            self._client.key_value_delete(f"popdist/{channel}/{number - 1}")
        return [json.loads(text) for _, text in sorted(found)]

    # ---- who is there ---------------------------------------------------------------------------
    def _tell(self, word: str) -> None:
        """Let the others read a word about this process."""
        self._client.key_value_set(f"{_STATUS}/{self.index:06d}", word, allow_overwrite=True)

    def _told(self) -> dict[int, str]:
        """What each process has told last."""
        found = self._client.key_value_dir_get(_STATUS)
        return {int(key.rpartition("/")[2]): word for key, word in found}

    def _watch(self) -> None:
        """Tell the others again and again that this process lives, and look who does not."""
        launcher = os.getppid() if os.environ.get(LAUNCHER) == str(os.getppid()) else None
        heard = dict.fromkeys(range(self.count), ("", 0.0))
        closed: set[int] = set()
        waits_for_nobody = 0
        now, before, heard_of_service = 0.0, time.monotonic(), 0.0
        for beat in itertools.count():
            if launcher is not None and os.getppid() != launcher:
                self._end_with("popdist.run has ended, and so does this process")
            if self._leaving.wait(_LOOK):
                return
            # While this process was stopped itself, it could not hear the others.
            now += min(time.monotonic() - before, _PAUSE)
            before = time.monotonic()
            closed |= self._ended()
            try:
                self._tell(str(beat))
                told = self._told()  # after `closed`: who leaves tells so before it ends
                heard_of_service = now
            except Exception:  # a busy service; when it is gone, JAX mostly ends the process
                if now - heard_of_service > SILENCE:
                    self._end_with("the service at which the processes meet cannot be reached")
                continue
            for index, (word, _) in heard.items():
                if told.get(index, "") != word:
                    heard[index] = told[index], now
            silent = {i for i, (_, since) in heard.items() if now - since > SILENCE}
            self._left, ended, followed = (
                {i for i, word in told.items() if word == what}
                for what in (_LEFT, _ENDED, _FOLLOWED)
            )
            lost = sorted((silent | ended | closed) - self._left - followed)
            waits_for_nobody = waits_for_nobody + 1 if self._left and self._waiting else 0
            if waits_for_nobody * _LOOK > _LEAVING:
                lost = lost or sorted(self._left)
            if lost:
                first = min(set(heard) - self._left - set(lost), default=self.index)
                self._end_with(self._loss(lost[0]) if self.index == first else "")

    def _loss(self, index: int) -> str:
        host, pid, _ = self.members[index]
        return (
            f"process {index} of {self.count} (pid {pid} on {host}) has ended, and the others end "
            "with it"
        )

    def _end_with(self, text: str) -> NoReturn:
        if text and LAUNCHER not in os.environ:  # else the launcher says it
            print(f"error: {text}", file=sys.stderr, flush=True)
        threading.Timer(_AGREEING, os._exit, [PEER_LOST]).start()
        with suppress(Exception):  # the service may be gone, or not answer
            self._tell(_FOLLOWED)
        os._exit(PEER_LOST)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Work that needs the others. If it fails since one is missing, say so and end."""
        from jax.errors import JaxRuntimeError

        try:
            yield
        except JaxRuntimeError:
            end = time.monotonic() + SILENCE + 5
            while time.monotonic() < end:  # `_watch` ends the process as soon as it knows
                if self._left:
                    self._end_with(self._loss(min(self._left)))
                time.sleep(0.1)
            raise

    # ---- the end --------------------------------------------------------------------------------
    def leave(self) -> None:
        """Part from the others, who may go on. Process 0 waits for them a while."""
        if self._leaving.is_set():
            return
        self._stop_listening(_LEFT)
        with suppress(Exception):  # the service may be gone
            self._client.shutdown()
        if self._server is not None:
            assert self._server.stdin is not None
            assert self._server.stdout is not None
            with suppress(OSError):
                self._server.stdin.write("bye\n")
                self._server.stdin.flush()
            # The service needs no process 0, but where this is all there is in a container, the
            # service ends with it, and JAX aborts those who are still there.
            select.select([self._server.stdout], [], [], PATIENCE)
        self._output.close()

    def fail(self, text: str, code: int) -> NoReturn:
        """Say what is wrong, unless a process before this one says the same; then end."""
        said: dict[int, str] = {}
        with suppress(Exception):  # the service may be gone
            self._client.key_value_set(f"{_SAID}/{self.index:06d}", json.dumps(text))
            end = time.monotonic() + _AGREEING
            while len(said) < self.count and time.monotonic() < end:
                found = self._client.key_value_dir_get(_SAID)
                said = {int(k.rpartition("/")[2]): json.loads(t) for k, t in found}
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
        self._stop_listening(_ENDED)
        os._exit(code)

    def _stop_listening(self, word: str) -> None:
        """Tell the others how this process ends, and no longer look for them."""
        from jax._src import distributed

        self._leaving.set()
        self._watcher.join()  # before the interpreter ends, which must not find it in an RPC
        distributed.global_state.client = None
        with suppress(Exception):  # the service may be gone
            self._tell(word)

    def _uncaught(self, kind: Any, error: Any, trace: Any) -> None:
        self._usual_hook(kind, error, trace)
        self.end(1)


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


def _own_address(host: str, port: int) -> str | None:
    """The address of this machine by which it reaches `host`; None if IPv4 does not."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))  # sends nothing
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _device_files() -> list[str]:
    return os.listdir("/dev") if os.path.isdir("/dev") else []
