"""What a process asks of the coordination service, counted."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple


class RpcStats(NamedTuple):
    """Requests to the coordination service.

    Attributes:
        messages: requests, each with its answer.
        sent, received: bytes of keys and values in them.
    """

    messages: int
    sent: int
    received: int


class CountingClient:
    """A client of the coordination service."""

    def __init__(self, client: Any) -> None:
        """Args: `client`: JAX's."""
        self._client = client
        self._lock = threading.Lock()
        self.rpc_stats = RpcStats(0, 0, 0)

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        """Store a value."""
        self._count(len(key) + len(value))
        self._client.key_value_set(key, value, allow_overwrite=allow_overwrite)

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        """All keys that begin so, with their values."""
        entries: list[tuple[str, str]] = self._client.key_value_dir_get(key)
        self._count(len(key), sum(len(name) + len(value) for name, value in entries))
        return entries

    def blocking_key_value_get(self, key: str, milliseconds: int) -> str:
        """A value, as soon as there is one."""
        value: str = self._client.blocking_key_value_get(key, milliseconds)
        self._count(len(key), len(value))
        return value

    def key_value_delete(self, key: str) -> None:
        """Forget a value, if there is one."""
        self._client.key_value_delete(key)
        self._count(len(key))

    def key_value_increment(self, key: str, by: int) -> int:
        """Add to a number, and return it."""
        self._count(len(key))
        return int(self._client.key_value_increment(key, by))

    def wait_at_barrier(self, key: str, milliseconds: int) -> None:
        """Return when all processes are here."""
        self._count(len(key))
        self._client.wait_at_barrier(key, milliseconds)

    def shutdown(self) -> None:
        """Part from the service."""
        self._client.shutdown()

    def _count(self, sent: int, received: int = 0) -> None:
        with self._lock:
            messages, before, after = self.rpc_stats
            self.rpc_stats = RpcStats(messages + 1, before + sent, after + received)
