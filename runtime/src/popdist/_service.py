"""The coordination service of JAX in a process of its own, which process 0 starts.

In process 0 itself it would end with it, and its end makes JAX abort all other processes before
they can say what happened. This one lives for as long as any of them does: each holds a connection
to it, its lifeline, which the system closes when the process has ended.

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


def _outlive(server: socket.socket, processes: int) -> None:
    """Return when the other ends of all lifelines are closed, and process 0 has ended."""
    waiting = selectors.DefaultSelector()
    waiting.register(server, selectors.EVENT_READ)
    waiting.register(0, selectors.EVENT_READ)
    missing, alive, end = processes, 0, float("inf")
    has_first = True
    while (alive or has_first) and time.monotonic() < end:
        for key, _ in waiting.select(timeout=1.0):
            if key.fileobj is server:
                waiting.register(server.accept()[0], selectors.EVENT_READ)
                missing, alive = missing - 1, alive + 1
                continue
            waiting.unregister(key.fileobj)
            if key.fd == 0:
                has_first = False
                end = float("inf") if os.read(0, 4) == b"bye\n" else time.monotonic() + LINGER
            else:
                alive -= 1
        if alive <= 1 and not missing:
            os.close(1)
            missing = -1


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
    _outlive(server, processes)
    del service
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
