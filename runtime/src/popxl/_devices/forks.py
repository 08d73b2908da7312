"""Detection of forked processes: a fork inherits the devices' memory, but not XLA's threads.

Nothing can run in a fork, and nothing may be cleaned up there: the destructor of a device client
waits for threads that do not exist, and files belong to the parent process.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

from popxl.errors import popart_exception

_clients: WeakSet[Any] = WeakSet()
_is_forked = False


def mark_devices_used(devices: Iterable[Any]) -> None:
    """Records that this process uses devices."""
    _clients.update(device.client for device in devices)


def is_forked() -> bool:
    """True if this process was forked from one that used devices."""
    return _is_forked


def check_not_forked() -> None:
    """Raises popart_exception in a process that was forked from one that used devices."""
    if _is_forked:
        raise popart_exception(
            "this process was forked from one that has devices, which a fork loses: start it anew, "
            "with multiprocessing.get_context('spawn')"
        )


def _after_fork() -> None:
    global _is_forked
    for client in _clients:
        _is_forked = True
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))  # never destroyed


os.register_at_fork(after_in_child=_after_fork)
