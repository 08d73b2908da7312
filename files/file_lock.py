"""Advisory file locks (flock), which the kernel releases when the process ends."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

_UNSUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)  # a file system without locks


def open_lock(path: Path) -> int:
    """Open a file for locking, creating it if missing; returns its file descriptor.

    Programs that are started meanwhile do not inherit it: they would go on holding the lock. A link
    is not followed: what it leads to would be overwritten.

    Raises:
        OSError: it cannot be opened.
    """
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)


def try_lock(descriptor: int, wait: bool = False) -> bool | None:
    """Lock an open file exclusively; returns False if another process holds the lock.

    Args:
        wait: until no other process has the lock.

    Returns:
        Whether it is locked; None: the file system has no locks.

    Raises:
        OSError: it fails otherwise.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return None
        raise
    return True
