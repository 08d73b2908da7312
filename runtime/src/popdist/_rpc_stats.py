"""Counters of requests to the coordination service."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple


class RpcStats(NamedTuple):
    """Count and bytes of requests to the coordination service, by purpose.

    Attributes:
        messages: requests, each with its answer.
        sent, received: bytes of keys and values in them.
    """

    messages: int
    sent: int
    received: int


class _CountingRpcClient:
    """Wraps a client of the coordination service and counts its requests."""

    def __init__(self, client: Any) -> None:
        """Wrap a client of JAX's coordination service, whose calls are counted."""
        self._client = client
        self._lock = threading.Lock()
        self.rpc_stats = RpcStats(0, 0, 0)

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        """Sets the value of a key in the coordination service."""
        self._count_request(len(key) + len(value))
        self._client.key_value_set(key, value, allow_overwrite=allow_overwrite)

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        """Returns all (key, value) pairs of the coordination service whose keys have a prefix."""
        entries: list[tuple[str, str]] = self._client.key_value_dir_get(key)
        self._count_request(len(key), sum(len(name) + len(value) for name, value in entries))
        return entries

    def blocking_key_value_get(self, key: str, milliseconds: int) -> str:
        """Waits until a key of the coordination service is set, and returns its value."""
        value: str = self._client.blocking_key_value_get(key, milliseconds)
        self._count_request(len(key), len(value))
        return value

    def key_value_delete(self, key: str) -> None:
        """Deletes a key of the coordination service, if it is set."""
        self._client.key_value_delete(key)
        self._count_request(len(key))

    def key_value_increment(self, key: str, amount: int) -> int:
        """Increments an integer in the coordination service, and returns it."""
        self._count_request(len(key))
        return int(self._client.key_value_increment(key, amount))

    def wait_at_barrier(self, key: str, milliseconds: int) -> None:
        """Waits until all processes of the run have reached the named barrier."""
        self._count_request(len(key))
        self._client.wait_at_barrier(key, milliseconds)

    def shutdown(self) -> None:
        """Disconnects from the coordination service."""
        self._client.shutdown()

    def _count_request(self, sent: int, received: int = 0) -> None:
        with self._lock:
            messages, before, after = self.rpc_stats
            self.rpc_stats = RpcStats(messages + 1, before + sent, after + received)
