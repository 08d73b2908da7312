"""An HTTP server of one page, whose readers cannot use up the threads and files of the process."""

from __future__ import annotations

import io
import socket
import threading
import time
from contextlib import suppress
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

MAX_CONNECTIONS = 8
"""Open at the same time. One more takes the place of the oldest."""

_PAUSE = 1.0  # seconds after a connection that could not be accepted


class Handler(WSGIRequestHandler):
    """Answers one request, and logs nothing."""

    timeout = 5.0  # seconds without a byte, in either direction

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""

    def get_stderr(self) -> io.StringIO:
        """Errors of a request, which strangers can cause, do not belong on the screen of a run."""
        return io.StringIO()


class PageServer(ThreadingMixIn, WSGIServer):
    """A thread for each connection, of which few are open."""

    daemon_threads = True
    request_queue_size = 128  # of a full queue the kernel lets readers wait a second

    def __init__(self, host: str, port: int, application: Any) -> None:
        """Listen.

        Args:
            application: answers the requests, as WSGI says.

        Raises:
            OSError: the host is unknown, or the port is not free.
        """
        self.open_connections: dict[socket.socket, None] = {}  # oldest first
        self._changed = threading.Condition()
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, _, _, _, address = found[0]
        super().__init__((str(address[0]), port), Handler)
        self.set_app(application)

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection. Where that fails, it still waits, and the next trial comes later."""
        try:
            return super().get_request()
        except OSError:
            time.sleep(_PAUSE)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, once there is a place."""
        with self._changed:
            if len(self.open_connections) >= MAX_CONNECTIONS:
                _end(next(iter(self.open_connections)))
            self._changed.wait_for(lambda: len(self.open_connections) < MAX_CONNECTIONS)
            self.open_connections[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection, whose place is free then."""
        super().shutdown_request(request)
        with self._changed:
            self.open_connections.pop(request, None)
            self._changed.notify()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: the reader is gone, or has said nothing."""

    def server_close(self) -> None:
        """Close all connections."""
        super().server_close()
        with self._changed:
            for connection in self.open_connections:
                _end(connection)


def _end(connection: socket.socket) -> None:
    """Wake the thread of a connection, which then closes it."""
    with suppress(OSError):  # the other end has closed it
        connection.shutdown(socket.SHUT_RDWR)
