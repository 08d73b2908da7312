"""The coordination service of JAX in a process of its own, which process 0 starts.

In process 0 itself it would end with it, and its end makes JAX abort all other processes before
they can say what happened. This one lives for as long as any of them does: each holds a connection
to it, its lifeline, which the system closes when the process has ended. It begins with the index of
the process, and then brings the indices of those that have ended, each a word of `WORD` bytes.

    python _service.py ADDRESS PORT PROCESSES

On standard output, `ready PORT` says that it serves, and where it takes lifelines. The end of that
output says that process 0 is the only one left. A line `bye` on standard input says that process 0
has parted from the others; if its input ends without, process 0 has died, and what others are left
must end soon.
"""

from __future__ import annotations

import os
import selectors
import socket
import sys
import time
from contextlib import suppress

WORD = 4  # bytes
LINGER = 45.0  # seconds; longer than others take to notice that process 0 is gone
_NEVER = 7 * 24 * 3600  # seconds: processes watch each other themselves
_PORT_WAIT = 60.0  # seconds; longer than the service of a run before lingers


def _wait_for_port(port: int) -> bool:
    """Wait until nobody listens on a port. gRPC itself would share it."""
    end = time.monotonic() + _PORT_WAIT
    while True:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                if time.monotonic() > end:
                    return False
                time.sleep(0.2)
            else:
                return True


def _lifeline_server(address: str) -> socket.socket:
    """A socket that listens on a port of the system's choice."""
    if address == "[::]" and socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("" if address == "[::]" else address, 0))


class _Lifelines:
    """The connections by which the service sees who lives."""

    def __init__(self, server: socket.socket, processes: int) -> None:
        self._server, self._missing = server, processes
        self._index: dict[socket.socket, bytes] = {}
        self._waiting = selectors.DefaultSelector()
        self._waiting.register(server, selectors.EVENT_READ)

    def outlast(self) -> None:
        """Return when the other ends of all are closed, and process 0 has ended."""
        end, has_first = float("inf"), True
        self._waiting.register(0, selectors.EVENT_READ)
        while (self._index or has_first) and time.monotonic() < end:
            for key, _ in self._waiting.select(timeout=1.0):
                if key.fileobj is self._server:
                    self._take()
                elif isinstance(key.fileobj, socket.socket):
                    self._hear(key.fileobj)
                else:
                    self._waiting.unregister(0)
                    said_bye, has_first = os.read(0, 4) == b"bye\n", False
                    end = float("inf") if said_bye else time.monotonic() + LINGER

    def _take(self) -> None:
        line = self._server.accept()[0]
        self._index[line] = b""
        self._waiting.register(line, selectors.EVENT_READ)
        self._missing -= 1

    def _hear(self, line: socket.socket) -> None:
        """An index at the beginning, else the end of the process."""
        try:
            word = line.recv(WORD)
        except OSError:
            word = b""
        if word:
            self._index[line] = word
            return
        self._waiting.unregister(line)
        line.close()
        ended = self._index.pop(line)
        for other in self._index:
            with suppress(OSError):
                other.send(ended, socket.MSG_DONTWAIT)
        if len(self._index) <= 1 and not self._missing:
            with suppress(OSError):  # it is closed
                os.close(1)


def main(address: str, port: int, processes: int) -> None:
    """Serve the processes until they have ended."""
    from jaxlib import _jax

    if not _wait_for_port(port):
        print("the port is in use", flush=True)
        return
    server = _lifeline_server(address)
    service = _jax.get_distributed_runtime_service(
        f"{address}:{port}",
        processes,
        heartbeat_timeout=_NEVER,
        cluster_register_timeout=_NEVER,
        shutdown_timeout=1,
        recoverable=True,  # a process that is gone is reported, instead of ending all others
    )
    print("ready", server.getsockname()[1], flush=True)
    _Lifelines(server, processes).outlast()
    del service
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
