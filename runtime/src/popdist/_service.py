"""The coordination service of JAX in a process of its own, which process 0 starts, and its door.

In process 0 itself it would end with it, and its end makes JAX abort all other processes before
they can say what happened. This one lives for as long as any of them does, and heeds no signal: a
launcher, Slurm for one, sends its signals to everything that a job has started.

At the coordinator's port there is the door. Who knocks says which run it belongs to, which of how
many processes it is, and hears the port of JAX's service; the connection stays open, as its
lifeline, which the system closes when the process has ended. It then brings the indices of those
that have ended, each a word of `WORD` bytes. Whoever says anything else is turned away.

    python _service.py HOST PORT SERVICE_PORT PROCESSES RUN

On standard output, `ready` says that it serves, and `refused WHO: WHY` tells of a stranger. The end
of that output says that process 0 is the only one left. A line `bye` on standard input says that
process 0 has parted from the others; if its input ends without, process 0 has died, and what others
are left must end soon.
"""

from __future__ import annotations

import errno
import hashlib
import ipaddress
import os
import resource
import selectors
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import suppress

WORD = 4  # bytes
HELLO = struct.Struct("!8s16sII")
"""What a process says: `MAGIC`, its run's digest, its index, the number of processes."""

ANSWER = struct.Struct("!8sII")
"""What it hears: `MAGIC`, one of the words below, the port of JAX's service."""

MAGIC = b"popdist2"
WELCOME, OTHER_RUN, TAKEN, OTHER_COUNT = range(4)
REASONS = {
    OTHER_RUN: "it belongs to another run",
    TAKEN: "the run has a process of its index already",
    OTHER_COUNT: "it expects another number of processes",
}
SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
LINGER = 45.0  # seconds; longer than others take to notice that process 0 is gone
_NEVER = 7 * 24 * 3600  # seconds: processes watch each other themselves
_PORT_WAIT = 60.0  # seconds; longer than the service of a run before lingers
_TO_SAY = 10.0  # seconds in which who knocks must have said who it is
_STRANGERS = 64  # who may knock at the same time and say nothing
_NOTES = 5  # strangers that are told of
_SPARE = 128  # open files beyond those of the processes


def digest_of(run: str) -> bytes:
    """What stands for the name of a run at the door."""
    return hashlib.sha256(run.encode()).digest()[:16]


class _Door:
    """Where processes come in; it sees who lives."""

    def __init__(self, server: socket.socket, service_port: int, processes: int, run: str) -> None:
        self._server, self._port, self._count = server, service_port, processes
        self._run = digest_of(run)
        self._members: dict[socket.socket, int] = {}
        self._came: set[int] = set()
        self._strangers: dict[socket.socket, tuple[bytes, float, str]] = {}  # said, since, who
        self._noted: set[str] = set()
        self._waiting = selectors.DefaultSelector()
        server.setblocking(False)
        self._waiting.register(server, selectors.EVENT_READ)

    def outlast(self) -> None:
        """Return when the other ends of all are closed, and process 0 has ended."""
        end, has_first = float("inf"), True
        self._waiting.register(0, selectors.EVENT_READ)
        while (self._members or has_first) and time.monotonic() < end:
            for key, _ in self._waiting.select(timeout=1.0):
                if key.fileobj is self._server:
                    self._open()
                elif isinstance(key.fileobj, socket.socket):
                    self._hear(key.fileobj)
                else:
                    self._waiting.unregister(0)
                    said_bye, has_first = os.read(0, 4) == b"bye\n", False
                    end = float("inf") if said_bye else time.monotonic() + LINGER
            self._send_away()

    def _open(self) -> None:
        with suppress(OSError):  # it is gone again, or there are no more descriptors
            line, address = self._server.accept()
            line.setblocking(False)
            self._strangers[line] = b"", time.monotonic(), str(address[0])
            self._waiting.register(line, selectors.EVENT_READ)

    def _send_away(self) -> None:
        """Those who say nothing, the first first if they are many."""
        now = time.monotonic()
        silent = list(self._strangers.items())
        for i, (line, (_, since, who)) in enumerate(silent):
            if now - since > _TO_SAY or len(silent) - i > _STRANGERS + self._count:
                self._refuse(line, who, "it does not say who it is")

    def _hear(self, line: socket.socket) -> None:
        try:
            words = line.recv(HELLO.size)
        except BlockingIOError:
            return
        except OSError:
            words = b""
        if line in self._members:
            if not words:  # nothing that a member says has a meaning
                self._part(line)
            return
        said, since, who = self._strangers[line]
        said += words
        if not words or said[: len(MAGIC)] != MAGIC[: len(said)]:
            self._refuse(line, who, "it does not say who it is")
        elif len(said) < HELLO.size:
            self._strangers[line] = said, since, who
        else:
            self._answer(line, who, said[: HELLO.size])

    def _answer(self, line: socket.socket, who: str, hello: bytes) -> None:
        _, run, index, count = HELLO.unpack(hello)
        word = WELCOME
        if run != self._run:
            word = OTHER_RUN
        elif count != self._count or index >= count:
            word = OTHER_COUNT
        elif index in self._came:
            word = TAKEN
        with suppress(OSError):
            line.send(ANSWER.pack(MAGIC, word, self._port))
        if word != WELCOME:
            self._refuse(line, who, REASONS[word])
            return
        del self._strangers[line]
        self._members[line] = index
        self._came.add(index)

    def _refuse(self, line: socket.socket, who: str, why: str) -> None:
        del self._strangers[line]
        self._close(line)
        note = f"{who}: {why}"
        if note not in self._noted and len(self._noted) < _NOTES:
            self._noted.add(note)
            with suppress(OSError):
                os.write(1, f"refused {note}\n".encode())

    def _part(self, line: socket.socket) -> None:
        """The end of a process, which the others hear of."""
        ended = self._members.pop(line).to_bytes(WORD)
        self._close(line)
        for other in self._members:
            with suppress(OSError):
                other.send(ended, socket.MSG_DONTWAIT)
        if len(self._members) <= 1 and len(self._came) == self._count:
            with suppress(OSError):  # it is closed
                os.close(1)

    def _close(self, line: socket.socket) -> None:
        self._waiting.unregister(line)
        line.close()


# ---- sockets ------------------------------------------------------------------------------------
def _addresses(host: str) -> Iterator[str]:
    """Where to listen, best first: at the addresses that the host's name stands for.

    All of the machine's come last: for a name that is this machine's loopback in its own list of
    hosts, as on a Debian, but not in those of the others; and behind a translation of addresses.
    """
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    each = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    own = [a for a in each if not ipaddress.ip_address(a.partition("%")[0]).is_loopback]
    if not own and (host == "localhost" or host in each):
        own = each
    yield from own
    yield ""


def _listen(host: str, port: int) -> socket.socket | None:
    """The door's socket; waits while another run has the port. None: it has it for too long."""
    end = time.monotonic() + _PORT_WAIT
    while True:
        busy = False
        for address in _addresses(host):
            try:
                return _socket(address, port)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    busy = True
                    break
        if time.monotonic() > end or not busy:
            return None
        time.sleep(0.2)


def _socket(address: str, port: int) -> socket.socket:
    if not address and socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=4096
        )
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=4096)


def _hold_port(server: socket.socket, port: int) -> socket.socket:
    """A socket that keeps a port of the door's address for gRPC, which shares it.

    Raises:
        OSError: the port is in use.
    """
    held = socket.socket(server.family, socket.SOCK_STREAM)
    if port:  # to be refused if anybody has it
        with socket.socket(server.family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((server.getsockname()[0], port))
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind((server.getsockname()[0], port))
    return held


def raise_descriptors() -> int:
    """Raise the number of files that this process may open as far as it may; returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


def main(host: str, port: int, service_port: int, processes: int, run: str) -> None:
    """Serve the processes until they have ended."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # they were blocked while this began
    limit, needed = raise_descriptors(), 2 * processes + _SPARE
    if limit < needed:
        print(f"{processes} processes need {needed} open files, but the limit is {limit}: raise it "
              "by `ulimit -n`", flush=True)  # fmt: skip
        return
    server = _listen(host, port)
    if server is None:
        print("the port is in use, or no address of this machine", flush=True)
        return
    try:
        held = _hold_port(server, service_port)
    except OSError:
        print(f"the second port {service_port} is in use", flush=True)
        return
    address, found = held.getsockname()[:2]
    from jaxlib import _jax

    service = _jax.get_distributed_runtime_service(
        f"[{address}]:{found}" if ":" in address else f"{address}:{found}",
        processes,
        heartbeat_timeout=_NEVER,
        cluster_register_timeout=_NEVER,
        shutdown_timeout=1,
        recoverable=True,  # a process that is gone is reported, instead of ending all others
    )
    print("ready", flush=True)
    _Door(server, found, processes, run).outlast()
    del service
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
