"""The values of the last step, for Prometheus to read, which `--metrics.port` asks for."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from config.errors import UserError
from run.records.metrics import Sample
from run.records.page_server import PageServer


class PrometheusPage:
    """Serves a gauge for each value that metrics.jsonl has, such as popxl_loss."""

    def __init__(self, host: str, port: int) -> None:
        """Begin to serve.

        Raises:
            UserError: prometheus_client is not installed, or the port cannot be had.
        """
        try:
            from prometheus_client import CollectorRegistry, make_wsgi_app
        except ImportError:
            raise UserError(
                "--metrics.port needs the package prometheus_client: pip install prometheus_client"
            ) from None
        self._row: dict[str, float] = {}
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server = PageServer(host, port, make_wsgi_app(registry))
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
        """What a reader gets, as prometheus_client asks for it."""
        from prometheus_client.core import GaugeMetricFamily

        for name, value in self._row.items():
            shown = f"popxl_{name.replace('/', '_')}"
            yield GaugeMetricFamily(shown, f"{name} of metrics.jsonl", value)

    def log(self, row: Mapping[str, float], samples: Sequence[Sample] = ()) -> None:
        """Show the values of a step; those that it lacks stay."""
        self._row = {**self._row, **row}

    def close(self, failed: bool = False) -> None:
        """End serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
