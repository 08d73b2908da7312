"""The coordination service of JAX in a process of its own, which process 0 starts.

In process 0 itself it would end with it, and its end makes JAX abort all other processes before
they can say what happened. This one lives on for a while, so that they learn who is missing.

    python _service.py ADDRESS PORT PROCESSES

`ready` on standard output says that it listens. It ends on the line `bye` on standard input, or
some time after the other end of that has closed.
"""

from __future__ import annotations

import os
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


def main(address: str, port: int, processes: int) -> None:
    """Serve until told to end."""
    from jaxlib import _jax

    if not _wait_for_port(port):
        print("the port is in use", flush=True)
        return
    service = _jax.get_distributed_runtime_service(
        f"{address}:{port}",
        processes,
        heartbeat_timeout=_NEVER,
        cluster_register_timeout=_NEVER,
        shutdown_timeout=1,
        recoverable=True,  # a process that is gone is reported, instead of ending all others
    )
    print("ready", flush=True)
    if sys.stdin.readline() != "bye\n":
        time.sleep(LINGER)
    del service
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
