"""Server that authenticates a run's processes and relays them to JAX's coordination service.

Process 0 starts it. Inside process 0 it would end with that process, and JAX would abort all other
processes before they can report what happened. It lives until all processes have ended, and ignores
signals, since launchers such as Slurm send theirs to everything that a job has started.

Each connection to the coordinator's port starts with a handshake: the coordinator sends a random
challenge, the process answers with its run, index, world size and an HMAC with the run's secret.
The first connection of a process is its lifeline: it stays open until the operating system closes
it at the end of the process, and delivers the indices of other processes that have ended,
`INDEX_BYTES` bytes each. The second is relayed to JAX's service, which listens on a Unix socket of
this user. Other connections are rejected.

    python _coordination_service.py HOST PORT PROCESSES RUN

reads POPDIST_SECRET and POPDIST_SILENCE. It prints `ready` when it serves, `refused WHO: WHY` for
each rejected connection, and closes standard output when only process 0 is left. Process 0 writes
`bye` to its standard input after a normal shutdown; end of input without it means that process 0
has died, and that the other processes will end soon.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import ipaddress
import os
import resource
import secrets
import selectors
import shutil
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

INDEX_BYTES = 4  # bytes
CHALLENGE = struct.Struct("!8s16s")
"""Challenge of the coordinator: `MAGIC`, a random number."""

HELLO = struct.Struct("!8s16sIII16s32s")
"""Hello of a process: `MAGIC`, run digest, index, number of processes, LIFELINE or SERVICE, random
number, `auth_code` of the challenge and the fields before."""

ANSWER = struct.Struct("!8sI32s")
"""Answer of the coordinator: `MAGIC`, one of the statuses below, `auth_code` of both."""

MAGIC = b"popdist3"
LIFELINE, SERVICE = range(2)
WELCOME, OTHER_RUN, INDEX_TAKEN, OTHER_COUNT, OTHER_SECRET = range(5)
REASONS = {
    OTHER_RUN: "it belongs to another run",
    INDEX_TAKEN: "the run has a process of its index already",
    OTHER_COUNT: "it expects another number of processes",
    OTHER_SECRET: "it has another secret",
}
SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
LINGER = 30.0  # seconds beyond the time in which other processes notice that process 0 is gone
_NEVER = 7 * 24 * 3600  # seconds: processes watch each other themselves
_PORT_WAIT = 15.0  # seconds more than the service of a run before lingers
_HELLO_TIMEOUT = 10.0  # seconds for a new connection to authenticate
_MAX_PENDING = 64  # connections that have not authenticated yet
_MAX_NOTES = 5  # rejected connections that are reported
_CHUNK_BYTES = 2**16  # bytes
_SPARE_FILES = 128  # open files beyond those of the processes


def hash_run_name(run_name: str) -> bytes:
    """Returns a hash of the run's name, which processes compare when they connect."""
    return hashlib.sha256(run_name.encode()).digest()[:16]


def auth_code(secret: str, *parts: bytes) -> bytes:
    """Returns the HMAC-SHA256 of the byte strings `parts`, keyed with the run's secret."""
    return hmac.digest(secret.encode(), b"".join(parts), "sha256")


def silence_timeout() -> float:
    """Returns the seconds after which a silent process counts as lost."""
    return float(os.environ.get("POPDIST_SILENCE") or 60)


def forward_bytes(source: socket.socket, target: socket.socket) -> None:
    """Copies bytes from one socket to another until either is closed."""
    with suppress(OSError):
        if target.family != socket.AF_UNIX:
            target.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while chunk := source.recv(_CHUNK_BYTES):
            target.sendall(chunk)


class Coordinator:
    """Server that authenticates the processes of a run, and reports processes that ended."""

    def __init__(
        self, server: socket.socket, service: str, processes: int, run_name: str, secret: str
    ) -> None:
        self._server, self._service, self._count = server, service, processes
        self._run, self._secret = hash_run_name(run_name), secret
        self._members: dict[socket.socket, int] = {}
        self._joined: set[int] = set()
        self._pending: dict[socket.socket, tuple[bytes, float, str]] = {}  # said, since, who
        self._challenges: dict[socket.socket, bytes] = {}
        self._reported: set[str] = set()
        self._selector = selectors.DefaultSelector()
        server.setblocking(False)
        self._selector.register(server, selectors.EVENT_READ)

    def serve(self) -> None:
        """Serves until all processes of the run, including process 0, have disconnected."""
        end, has_first = float("inf"), True
        self._selector.register(0, selectors.EVENT_READ)
        while (self._members or has_first) and time.monotonic() < end:
            for key, _ in self._selector.select(timeout=1.0):
                if key.fileobj is self._server:
                    self._accept_connection()
                elif isinstance(key.fileobj, socket.socket):
                    self._receive_request(key.fileobj)
                else:
                    self._selector.unregister(0)
                    said_bye, has_first = os.read(0, 4) == b"bye\n", False
                    end = (
                        float("inf") if said_bye else time.monotonic() + silence_timeout() + LINGER
                    )
            self._drop_idle()

    def _accept_connection(self) -> None:
        with suppress(OSError):  # it is gone again, or there are no more descriptors
            sock, address = self._server.accept()
            sock.setblocking(False)
            self._pending[sock] = b"", time.monotonic(), str(address[0])
            self._selector.register(sock, selectors.EVENT_READ)
            self._challenges[sock] = CHALLENGE.pack(MAGIC, secrets.token_bytes(16))
            sock.send(self._challenges[sock])

    def _drop_idle(self) -> None:
        """Closes connections that did not authenticate in time, and the oldest of too many."""
        now = time.monotonic()
        silent = list(self._pending.items())
        for i, (sock, (_, since, peer)) in enumerate(silent):
            if now - since > _HELLO_TIMEOUT or len(silent) - i > _MAX_PENDING + self._count:
                self._reject(sock, peer, "it does not say who it is")

    def _receive_request(self, sock: socket.socket) -> None:
        try:
            data = sock.recv(HELLO.size)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if sock in self._members:
            if not data:  # nothing that a member says has a meaning
                self._remove_member(sock)
            return
        received, since, peer = self._pending[sock]
        received += data
        if not data or received[: len(MAGIC)] != MAGIC[: len(received)]:
            self._reject(sock, peer, "it does not say who it is")
        elif len(received) < HELLO.size:
            self._pending[sock] = received, since, peer
        else:
            self._answer_request(sock, peer, received[: HELLO.size])

    def _answer_request(self, sock: socket.socket, peer: str, hello: bytes) -> None:
        _, run, index, count, request, number, code = HELLO.unpack(hello)
        status, challenge = WELCOME, self._challenges[sock]
        if run != self._run:
            status = OTHER_RUN
        elif not hmac.compare_digest(code, auth_code(self._secret, challenge, hello[: -len(code)])):
            status = OTHER_SECRET
        elif count != self._count or index >= count:
            status = OTHER_COUNT
        elif request == LIFELINE and index in self._joined:
            status = INDEX_TAKEN
        with suppress(OSError):
            sock.send(ANSWER.pack(MAGIC, status, auth_code(self._secret, number, bytes([status]))))
        if status != WELCOME:
            self._reject(sock, peer, REASONS[status])
            return
        del self._pending[sock], self._challenges[sock]
        if request == LIFELINE:
            self._members[sock] = index
            self._joined.add(index)
        else:
            self._selector.unregister(sock)
            self._relay_to_jax(sock)

    def _relay_to_jax(self, sock: socket.socket) -> None:
        """Relays an authenticated connection to JAX's coordination service."""
        try:
            service = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            service.connect(self._service)
        except OSError:  # who came hears that it is closed
            sock.close()
            return
        sock.setblocking(True)
        for ends in ((sock, service), (service, sock)):
            threading.Thread(target=_forward_and_shutdown, args=ends, daemon=True).start()

    def _reject(self, sock: socket.socket, peer: str, reason: str) -> None:
        del self._pending[sock], self._challenges[sock]
        self._close_connection(sock)
        note = f"{peer}: {reason}"
        if note not in self._reported and len(self._reported) < _MAX_NOTES:
            self._reported.add(note)
            with suppress(OSError):
                os.write(1, f"refused {note}\n".encode())

    def _remove_member(self, sock: socket.socket) -> None:
        """Removes a process that has ended; sends its index to the run's other processes."""
        ended = self._members.pop(sock).to_bytes(INDEX_BYTES)
        self._close_connection(sock)
        for other in self._members:
            with suppress(OSError):
                other.send(ended, socket.MSG_DONTWAIT)
        if len(self._members) <= 1 and len(self._joined) == self._count:
            with suppress(OSError):  # it is closed
                os.close(1)

    def _close_connection(self, sock: socket.socket) -> None:
        self._selector.unregister(sock)
        sock.close()


def _forward_and_shutdown(source: socket.socket, target: socket.socket) -> None:
    """Forwards bytes from one socket to another, then shuts the other down for writing."""
    forward_bytes(source, target)
    with suppress(OSError):  # it is closed
        target.shutdown(socket.SHUT_WR)


# ---- sockets ------------------------------------------------------------------------------------
def _listen_addresses(host: str) -> Iterator[str]:
    """Yields the addresses to listen on, best first: those of the host's name, then all interfaces.

    All of the machine's come last: for a name that is this machine's loopback in its own list of
    hosts, as on a Debian, but not in those of the others; and behind a translation of addresses.
    """
    entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in entries))
    public = [a for a in addresses if not ipaddress.ip_address(a.partition("%")[0]).is_loopback]
    if not public and (host == "localhost" or host in addresses):
        public = addresses
    yield from public
    yield ""


def _listen(host: str, port: int) -> socket.socket | None:
    """Returns a listening socket; None if the port stays in use by another run."""
    end = time.monotonic() + silence_timeout() + LINGER + _PORT_WAIT
    while True:
        busy = False
        for address in _listen_addresses(host):
            try:
                return _bound_socket(address, port)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    busy = True
                    break
        if time.monotonic() > end or not busy:
            return None
        time.sleep(0.2)


def _bound_socket(address: str, port: int) -> socket.socket:
    if not address and socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=4096
        )
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=4096)


def raise_open_file_limit() -> int:
    """Raises the soft limit of open files to the hard limit, and returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


def main(host: str, port: int, processes: int, run_name: str) -> None:
    """Serves the processes of one run as its coordinator until they have ended."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # they were blocked while this began
    limit, needed = raise_open_file_limit(), 4 * processes + _SPARE_FILES
    if limit < needed:
        print(f"{processes} processes need {needed} open files, but the limit is {limit}: raise it "
              "by `ulimit -n`", flush=True)  # fmt: skip
        return
    server = _listen(host, port)
    if server is None:
        print("the port is in use, or no address of this machine", flush=True)
        return
    from jaxlib import _jax

    folder = tempfile.mkdtemp(prefix="popdist-")  # of mode 700
    path = f"{folder}/service"
    service = _jax.get_distributed_runtime_service(
        f"unix:{path}",
        processes,
        heartbeat_timeout=_NEVER,
        cluster_register_timeout=_NEVER,
        shutdown_timeout=1,
        recoverable=True,  # a lost process is reported, instead of ending all others
    )
    print("ready", flush=True)
    Coordinator(server, path, processes, run_name, os.environ.get("POPDIST_SECRET", "")).serve()
    del service
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
