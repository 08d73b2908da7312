"""Byte windows of disk transfers: how far reads are ahead, and writes behind."""

from __future__ import annotations

DISK_WINDOW = 2**28
"""Bytes of each of the four windows of a folder: read ahead, waiting to be written, and the blocks
and the arrays that are kept to be used again."""

READ_AHEAD_BYTES = DISK_WINDOW
"""Bytes that are read ahead of their loads."""

WRITE_BEHIND_BYTES = DISK_WINDOW
"""Bytes of stored entries that may wait for the disk, or one; a store waits until it is among
them."""


def fits_byte_window(used: int, nbytes: int, window: int) -> bool:
    """True if a byte window for transfers has room for another item; an empty one takes any."""
    return not used or used + nbytes <= window
