"""Prometheus endpoint with the metrics of the last step (`--metrics.port`).

The number of connections is limited, so that clients cannot exhaust threads and files.
"""

from __future__ import annotations

import io
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from config.errors import UserError
from run.records.metrics_jsonl import PredictionSample

MAX_CONNECTIONS = 8
"""Maximum open connections; a further one closes the oldest."""

_PAUSE = 1.0  # seconds after a failed accept


class QuietRequestHandler(WSGIRequestHandler):
    """HTTP request handler that logs nothing."""

    timeout = 5.0  # seconds without traffic

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""

    def get_stderr(self) -> io.StringIO:
        """Return a buffer for error messages, so that clients' errors do not reach the screen."""
        return io.StringIO()


class ConnectionLimitedServer(ThreadingMixIn, WSGIServer):
    """HTTP server with a thread for each of at most `MAX_CONNECTIONS` connections."""

    daemon_threads = True
    request_queue_size = 128  # with a full queue, clients wait for a second

    def __init__(self, host: str, port: int, application: Any) -> None:
        """Listen on a port.

        Args:
            application: WSGI application that answers the requests.

        Raises:
            OSError: unknown host, or the port is in use.
        """
        self.open_connections: dict[socket.socket, None] = {}  # oldest first
        self._changed = threading.Condition()
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, _, _, _, address = addresses[0]
        super().__init__((str(address[0]), port), QuietRequestHandler)
        self.set_app(application)

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection; after a failure, pause before the next attempt."""
        try:
            return super().get_request()
        except OSError:
            time.sleep(_PAUSE)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a request in a thread; closes the oldest connection if there are too many."""
        with self._changed:
            if len(self.open_connections) >= MAX_CONNECTIONS:
                _shut_down_socket(next(iter(self.open_connections)))
            self._changed.wait_for(lambda: len(self.open_connections) < MAX_CONNECTIONS)
            self.open_connections[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close the connection of a request."""
        super().shutdown_request(request)
        with self._changed:
            self.open_connections.pop(request, None)
            self._changed.notify()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of a client that disconnected or sent no request."""

    def server_close(self) -> None:
        """Stop the server and close all connections."""
        super().server_close()
        with self._changed:
            for connection in self.open_connections:
                _shut_down_socket(connection)


def _shut_down_socket(connection: socket.socket) -> None:
    """Shut down a socket, so that its thread closes it."""
    with suppress(OSError):  # already closed by the client
        connection.shutdown(socket.SHUT_RDWR)


class PrometheusPage:
    """Serves a Prometheus gauge for each metric of the last step, such as popxl_loss."""

    def __init__(self, host: str, port: int) -> None:
        """Start serving.

        Raises:
            UserError: prometheus_client is not installed, or the port is in use.
        """
        try:
            from prometheus_client import CollectorRegistry, make_wsgi_app
        except ImportError:
            raise UserError(
                "--metrics.port needs the package prometheus_client: pip install prometheus_client"
            ) from None
        self._gauges: dict[str, float] = {}
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server = ConnectionLimitedServer(host, port, make_wsgi_app(registry))
        except OSError as error:
            reason = error.strerror or str(error)
            raise UserError(
                f"metrics cannot be served at {host}:{port} ({reason}): give another "
                "--metrics.port or --metrics.host"
            ) from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="metrics", daemon=True
        )
        self._thread.start()

    def collect(self) -> Iterable[Any]:
        """Yield the gauges; called by prometheus_client."""
        from prometheus_client.core import GaugeMetricFamily

        for name, value in self._gauges.items():
            gauge_name = f"popxl_{name.replace('/', '_')}"
            yield GaugeMetricFamily(gauge_name, f"{name} of metrics.jsonl", value)

    def log(self, metrics: Mapping[str, float], samples: Sequence[PredictionSample] = ()) -> None:
        """Update the gauges from a step's metrics; gauges of other metrics keep their values."""
        self._gauges = {**self._gauges, **metrics}

    def close(self, failed: bool = False) -> None:
        """Stop the HTTP server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
