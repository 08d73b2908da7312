"""Scheduling hints for exchanges; recorded by the ops created inside, decided by XLA."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from popxl.context import in_sequence


@contextmanager
def merge_exchange() -> Iterator[None]:
    """Let the remote and host exchanges created inside run together (a hint)."""
    with in_sequence(False):
        yield


@contextmanager
def io_tile_exchange(verify_overlap: bool = True) -> Iterator[None]:
    """Let the exchanges created inside overlap with compute (a hint).

    Args:
        verify_overlap: accepted; XLA's scheduler decides what overlaps.
    """
    with in_sequence(False):
        yield
