"""Process group of a run: rendezvous, host collectives, failure handling and shutdown.

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
from popdist._coordinator_monitor import (
    CoordinatorMonitor,
    exit_with_message,
    is_started_by_launcher,
)
from popdist._failure_detection import CHECK_INTERVAL, ENDED, LEFT, PeerMonitor, StatusBoard
from popdist._gpu_assignment import assign_gpus, visible_gpus
from popdist._handshake import connect_to_coordinator, local_address, reachable_address
from popdist._process_info import SECRET, SILENCE, DistributedError, ProcessInfo
from popdist._relay import CoordinatorRelay
from popdist._rpc_stats import RpcStats, _CountingRpcClient
from popdist._stdout_filter import GlooOutputFilter

RENDEZVOUS_TIMEOUT = 120  # seconds that all processes have to come
SHUTDOWN_WAIT = 10.0  # seconds that process 0 waits for the others at shutdown
_DUPLICATE_WAIT = 3.0  # seconds that a failing process waits for others with the same error
_REPLY_TIMEOUT = 20.0  # seconds that a process which ends because of another waits for the service
_EXTRA_CHECKS = 5  # further checks until a silent process counts as lost
_DISCONNECT_TIMEOUT = 60  # seconds for the service to hear that a process parts
_FAILURES, _ALL = "popdist/said", "popdist/all"
_STATUS = re.compile(r"([A-Z_]{5,}): ")  # of XLA, before what has failed
_NEVER = 7 * 24 * 3600  # seconds: `_monitor_peers` ends who waits for a process that is gone


class ProcessGroup:
    """The process group of a run; created once, by `popdist.init`."""

    def __init__(self, info: ProcessInfo) -> None:
        """Connects to the coordinator and the other processes.

        Raises:
            DistributedError: the others do not join in time, or JAX has started its devices
                already.
        """
        self.index, self.count = info.index, info.count
        self._gather_counts: Counter[str] = Counter()
        self._counts_lock = threading.Lock()
        self._is_shutting_down = threading.Event()
        self._waiting_on_peers: set[object] = set()
        self._failed: float | None = None  # time at which a collective failed
        self._server: subprocess.Popen[str] | None = None
        self._is_last_process = threading.Event()  # set when process 0 is the only one left
        self._ended_indices = b""  # incomplete index from the coordinator
        self.activity = ""  # what this process does
        self._silence = info.silence_timeout
        # Collectives connect each process to every other one.
        _coordination_service.raise_open_file_limit()
        client, reached = self._connect(info)
        self._client, monitor_client = _CountingRpcClient(client), _CountingRpcClient(client)
        self._status_board = StatusBoard(monitor_client, self.index)
        self._rpc_clients = {"exchange": self._client, "watch": monitor_client}
        local_value = [socket.gethostname(), os.getpid(), visible_gpus(), reached, self._silence]
        gathered = self.all_gather_object(local_value, "members")
        self._silence = self._coordinator_monitor.limit = gathered[0][
            4
        ]  # process 0's holds for all
        self.members: list[Any] = [one[:3] for one in gathered]
        self.local_process_count = sum(host == local_value[0] for host, _, _ in self.members)
        self._choose_gpus()
        _set_gloo_address(client, reachable_address(self.index, [one[3] for one in gathered]))
        self._output = GlooOutputFilter()
        self._monitor_thread = threading.Thread(
            target=self._monitor_peers, name="popdist", daemon=True
        )
        self._monitor_thread.start()
        atexit.register(self.shutdown)
        self._default_excepthook = sys.excepthook
        sys.excepthook = self._excepthook

    # ---- meeting --------------------------------------------------------------------------------
    def _connect(self, info: ProcessInfo) -> tuple[Any, str | None]:
        """Returns a client of JAX's coordination service, and this process's address.

        The address is the one as seen by the coordinator.
        """
        from jax._src import clusters, distributed, xla_bridge
        from jax._src.lib import _jax

        if xla_bridge.backends_are_initialized():
            raise DistributedError(
                "JAX has started its devices before this process met the others: call "
                "popdist.init() first"
            )
        coordinator = info.coordinator
        if coordinator is None:
            find = clusters.ClusterEnv.auto_detect_unset_distributed_params
            detected = find(None, info.count, info.index, [], None, RENDEZVOUS_TIMEOUT)[0]
            # JAX's port is that of the job, in which several runs may meet.
            coordinator = detected and f"{detected.rpartition(':')[0]}:{info.port}"
        if coordinator is None:
            raise DistributedError(
                "nobody says where the processes meet: give --coordinator HOST:PORT, or set "
                "POPDIST_COORDINATOR"
            )
        host, _, port = coordinator.rpartition(":")
        if info.index == 0:
            self._start_coordinator(host.strip("[]"), int(port), info)
        address = host.strip("[]"), int(port)
        self._lifeline = connect_to_coordinator(
            *address, info, _coordination_service.LIFELINE, RENDEZVOUS_TIMEOUT
        )
        self._lifeline.setblocking(False)
        try:
            service = connect_to_coordinator(
                *address, info, _coordination_service.SERVICE, RENDEZVOUS_TIMEOUT
            )
            client = _jax.get_distributed_runtime_client(
                CoordinatorRelay(service).address, info.index, init_timeout=RENDEZVOUS_TIMEOUT,
                shutdown_timeout=_DISCONNECT_TIMEOUT, heartbeat_timeout=_NEVER,
                use_compression=True,
            )  # fmt: skip
            client.connect()
        except Exception as error:
            raise DistributedError(
                f"process {info.index} did not meet all of the {info.count} processes at "
                f"{coordinator} within {RENDEZVOUS_TIMEOUT} s: start each with an index of its "
                "own, and the same coordinator"
            ) from error
        process_name = f"process {info.index} of {info.count}"
        self._coordinator_monitor = CoordinatorMonitor(
            self._lifeline, process_name, coordinator, self._silence
        )
        state = distributed.global_state
        state.client, state.coordinator_address = client, coordinator
        state.process_id, state.num_processes = info.index, info.count
        return client, local_address(host.strip("[]"), int(port))

    def _start_coordinator(self, host: str, port: int, info: ProcessInfo) -> None:
        """Starts the coordination service as a child process at the coordinator's address."""
        command = [sys.executable, str(Path(_coordination_service.__file__))]
        # What a signal to everything does before the service can say that it heeds none.
        previous = signal.pthread_sigmask(signal.SIG_BLOCK, _coordination_service.SIGNALS)
        try:
            self._server = subprocess.Popen(
                [*command, host, str(port), str(self.count), info.run],
                env=os.environ | {SECRET: info.secret, SILENCE: str(self._silence)},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                text=True, start_new_session=True,
            )  # fmt: skip
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous)
        assert self._server.stdout is not None
        reply = self._server.stdout.readline().strip()
        if reply != "ready":
            raise DistributedError(
                f"the processes cannot meet at port {port} of {host}: "
                f"{reply or 'the service ended'}; give another --coordinator"
            )
        threading.Thread(target=self._print_rejections, name="door", daemon=True).start()

    def _print_rejections(self) -> None:
        """Prints notes on connections that the coordination service rejects, until it ends."""
        assert self._server is not None
        assert self._server.stdout is not None
        for line in self._server.stdout:
            with suppress(OSError, ValueError):
                print(f"note: {line.strip()}, at the coordinator's port", file=sys.stderr)
        self._is_last_process.set()

    def _newly_ended_processes(self) -> set[int]:
        """Returns the processes whose connections were closed since the last call."""
        with suppress(OSError):  # there are none
            self._ended_indices += self._lifeline.recv(
                self.count * _coordination_service.INDEX_BYTES
            )
        complete = (
            len(self._ended_indices)
            // _coordination_service.INDEX_BYTES
            * _coordination_service.INDEX_BYTES
        )
        records = self._ended_indices[:complete]
        self._ended_indices = self._ended_indices[complete:]
        ended = {
            int.from_bytes(records[i : i + _coordination_service.INDEX_BYTES])
            for i in range(0, complete, _coordination_service.INDEX_BYTES)
        }
        return ended & set(range(self.count))

    def _choose_gpus(self) -> None:
        import jax

        device_ids = os.environ.get("JAX_LOCAL_DEVICE_IDS")
        devices = assign_gpus(self.index, [(host, gpus) for host, _, gpus in self.members])
        chosen = device_ids or ",".join(map(str, devices or ()))
        if chosen:
            jax.config.update("jax_cuda_visible_devices", chosen)

    # ---- exchange -------------------------------------------------------------------------------
    def all_gather_object(self, value: Any, channel: str = "main") -> list[Any]:
        """Gathers one JSON value from each process, in process order (collective).

        Args:
            value: a small JSON value.
            channel: calls of one channel meet; use one for each thread.
        """
        with self._counts_lock:
            round_index = self._gather_counts[channel]
            self._gather_counts[channel] += 1
        # Two names, which the service keeps: all have read one before any writes it again, for in
        # between they all have met at the other.
        key_prefix, client = f"popdist/{channel}/{round_index % 2}", self._client
        local_value = json.dumps(value)
        client.key_value_set(f"{key_prefix}/{self.index:06d}", local_value, allow_overwrite=True)
        with self.collective_section(), self._wait_on_peers():
            client.wait_at_barrier(f"popdist/{channel}", _NEVER * 1000)
            # The service takes time for each value that it looks up: one process asks for all.
            if self.index:
                text = client.blocking_key_value_get(
                    f"{_ALL}/{channel}/{round_index}", _NEVER * 1000
                )
            else:
                text = f"[{','.join(v for _, v in sorted(client.key_value_dir_get(key_prefix)))}]"
                client.key_value_set(f"{_ALL}/{channel}/{round_index}", text)
                client.key_value_delete(f"{_ALL}/{channel}/{round_index - 1}")  # all have read it
        values: list[Any] = json.loads(text)
        return values

    def rpc_stats(self) -> dict[str, RpcStats]:
        """Returns count and bytes of requests to the coordination service, by purpose."""
        return {purpose: counted.rpc_stats for purpose, counted in self._rpc_clients.items()}

    # ---- who is there ---------------------------------------------------------------------------
    def peer_status(self) -> dict[str, str]:
        """Returns the published activity of each other process, by its name and host.

        The service may be busy, or hang: to be called by a thread that may.
        """
        statuses = self._status_board.activities()
        return {
            f"process {i} (pid {pid} on {host})": statuses[i]
            for i, (host, pid, _) in enumerate(self.members)
            if i in statuses and i != self.index
        }

    def _monitor_peers(self) -> None:
        """Checks the other processes periodically; exits this process if one of them is lost."""
        monitor = PeerMonitor(
            self.count,
            self._status_board,
            self._newly_ended_processes,
            self._waiting_on_peers,
            self._silence,
            lambda: self.activity,
        )
        previous = time.monotonic()
        while not self._is_shutting_down.wait(CHECK_INTERVAL):
            elapsed, previous = time.monotonic() - previous, time.monotonic()
            try:
                lost = monitor.find_lost_peer(elapsed)
            except Exception:  # a busy service
                continue
            self._coordinator_monitor.reset_timeout()
            if lost is not None:
                self._exit_with_lost_peer(lost, monitor.failure_reason(lost))

    def _exit_with_lost_peer(self, lost: int, failure_reason: str) -> NoReturn:
        """Exits this process because another one is lost, with a message that names the lost one.

        Only the first process to exit names it; a process that was itself declared lost says so.
        """
        text = f"{self._describe_process(lost)} has {failure_reason}, and the others end with it"
        if is_started_by_launcher():  # the launcher says it
            text = ""
        unanswered = threading.Timer(_REPLY_TIMEOUT, exit_with_message, [text])
        unanswered.daemon = True
        unanswered.start()
        try:
            declared = self._status_board.declare_lost(lost)
        except Exception:  # better twice than never
            declared = None
        self._exit_if_declared_lost(declared)
        exit_with_message(text if declared is None else "")

    def _exit_if_declared_lost(self, declared: int | None) -> None:
        """Exits if other processes declared this one lost because they received no heartbeats."""
        if declared == self.index:
            silent = (
                f"the others have not heard of {self._describe_process(self.index)} for "
                f"{self._silence} s ({SILENCE}), and have ended"
            )
            exit_with_message("" if is_started_by_launcher() else silent)

    def _describe_process(self, process: int) -> str:
        host, pid, _ = self.members[process]
        return f"process {process} of {self.count} (pid {pid} on {host})"

    @contextmanager
    def collective_section(self) -> Iterator[None]:
        """Context for work of all processes: exits this process if it fails because one is lost."""
        try:
            yield
        except Exception as error:
            self._wait_for_peer_loss(error)
            raise

    def _wait_for_peer_loss(self, error: BaseException) -> None:
        """Waits, after an error that a lost process can have caused, for the monitor to exit."""
        if not _is_jax_failure(error):
            return
        if self._failed is None:
            self._failed = time.monotonic()
        with self._wait_on_peers():
            end = self._failed + self._silence + _EXTRA_CHECKS * CHECK_INTERVAL
            time.sleep(max(end - time.monotonic(), 0.0))

    @contextmanager
    def _wait_on_peers(self) -> Iterator[None]:
        """Context for waits that can end only while all other processes are running."""
        token = object()
        self._waiting_on_peers.add(token)
        try:
            yield
        finally:
            self._waiting_on_peers.discard(token)

    # ---- the end --------------------------------------------------------------------------------
    def shutdown(self) -> None:
        """Leaves the process group; other processes can continue, and process 0 waits briefly."""
        if self._is_shutting_down.is_set():
            return
        with suppress(Exception):  # the service may be gone
            self._exit_if_declared_lost(self._status_board.declared_lost())  # while it was stopped
        self._stop_monitoring(LEFT)
        with suppress(Exception):  # the service may be gone
            self._client.shutdown()
        if self._server is not None:
            assert self._server.stdin is not None
            with suppress(OSError):
                self._server.stdin.write("bye\n")
                self._server.stdin.flush()
            # The service needs no process 0, but where this is all there is in a container, the
            # service ends with it, and JAX aborts those who are still there.
            self._is_last_process.wait(SHUTDOWN_WAIT)
        self._output.close()

    def fail(self, message: str, exit_code: int) -> NoReturn:
        """Prints an error, unless a process of lower index prints the same one, and exits."""
        failures: dict[int, str] = {}
        with suppress(Exception):  # the service may be gone
            self._client.key_value_set(f"{_FAILURES}/{self.index:06d}", json.dumps(message))
            end = time.monotonic() + _DUPLICATE_WAIT
            while len(failures) < self.count and time.monotonic() < end:
                entries = self._client.key_value_dir_get(_FAILURES)
                failures = {int(k.rpartition("/")[2]): json.loads(t) for k, t in entries}
                time.sleep(0.05)
        if all(failures.get(i) != message for i in range(self.index)):
            with suppress(OSError):
                print(message, file=sys.stderr, flush=True)
        self.exit_process(exit_code)

    def exit_process(self, exit_code: int) -> NoReturn:
        """Exits this process at once; the other processes notice, and exit too."""
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        self._stop_monitoring(f"{ENDED} with code {exit_code}")
        os._exit(exit_code)

    def _stop_monitoring(self, status: str) -> None:
        """Publishes the status with which this process ends, and stops monitoring the others."""
        from jax._src import distributed

        self._is_shutting_down.set()
        self._monitor_thread.join()  # before the interpreter ends, which must not find it in an RPC
        distributed.global_state.client = None
        self._coordinator_monitor.reset_timeout()
        with suppress(Exception):  # the service may be gone
            self._status_board.publish_status(status)
        self._coordinator_monitor.stop()

    def _excepthook(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, Exception):
            self._wait_for_peer_loss(error)
        self._default_excepthook(kind, error, trace)
        self.exit_process(1)


def _is_jax_failure(error: BaseException | None) -> bool:
    """True if an error, or one of its causes, comes from devices or the coordination service.

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


def _set_gloo_address(client: Any, address: str | None) -> None:
    """Sets the address for gloo's CPU collectives to one that the other processes reach.

    By default gloo takes what the host's name stands for, which may be another interface, or
    127.0.1.1 on a Debian.
    """
    from jax._src import xla_bridge
    from jax._src.lib import _jax

    def make_collectives() -> Any:
        return xla_bridge.make_cpu_client(_jax.make_gloo_tcp_collectives(client, address))

    xla_bridge.register_backend_factory("cpu", make_collectives, priority=0, fail_quietly=False)
