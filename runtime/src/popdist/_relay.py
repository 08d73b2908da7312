"""Local relay to the coordination service, so that JAX does not abort when the service is gone.

JAX aborts a process with a stack trace as soon as its connection to the service breaks. Its client
therefore connects to a relay inside this process, which forwards all data and keeps the connection
open when the service is gone; `popdist._coordinator_monitor` then exits with one sentence.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import threading
from contextlib import suppress

from popdist._coordination_service import forward_bytes


class CoordinatorRelay:
    """Forwards a connection of this process between a local socket and the coordination service."""

    def __init__(self, service: socket.socket) -> None:
        """Listens at `address`. Args: `service`: a connection to the coordination service."""
        self._service = service
        name = f"popdist-{secrets.token_hex(8)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"\0{name}")
        self._listener.listen()
        self.address = f"unix-abstract:{name}"
        service.settimeout(None)
        threading.Thread(target=self._accept_connection, name="relay", daemon=True).start()

    def _accept_connection(self) -> None:
        while not _is_same_process(client := self._listener.accept()[0]):
            client.close()
        self._listener.close()
        back = threading.Thread(
            target=forward_bytes, args=(self._service, client), name="relay back", daemon=True
        )
        back.start()
        forward_bytes(client, self._service)
        with suppress(OSError):  # it is closed
            self._service.shutdown(socket.SHUT_WR)
        back.join()
        self._service.close()
        client.detach()  # which leaves it open to the end of the process


def _is_same_process(sock: socket.socket) -> bool:
    """True if the peer of a Unix socket is this process."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", credentials)[0] == os.getpid())
