"""Digests of a tensor's bytes, chunk by chunk, so that a range of it can be checked on its own."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_MIN_CHUNK = 2**20  # bytes of a chunk
_MAX_CHUNKS = 32  # chunks of a tensor: a table grows with tensors, and not with their bytes


class Digests(NamedTuple):
    """The digests of a tensor's bytes.

    Attributes:
        each: bytes of a chunk; the last one has the rest.
        sha256: a digest of each chunk, as hexadecimal digits.
    """

    each: int
    sha256: tuple[str, ...]

    @classmethod
    def of_array(cls, array: np.ndarray) -> Digests:
        """The digests of an array's elements in C order."""
        # As bytes, since bfloat16 does not support the buffer protocol.
        content = np.asarray(array, order="C").reshape(-1).view(np.uint8).data
        each = chunk_bytes(len(content))
        starts = range(0, len(content), each)
        return cls(each, tuple(digest_of_bytes(content[i : i + each]) for i in starts))

    @classmethod
    def saved(cls, sha256: Sequence[str], nbytes: int) -> Digests | None:
        """Digests from a record of so many bytes; None if there is not one for each chunk."""
        digests = cls(chunk_bytes(nbytes), tuple(sha256))
        return digests if len(sha256) == math.ceil(nbytes / digests.each) else None


def chunk_bytes(nbytes: int) -> int:
    """Bytes of a chunk of a tensor of `nbytes`: a power of two."""
    return max(_MIN_CHUNK, 1 << (max(nbytes - 1, 0) // _MAX_CHUNKS).bit_length())


def digest(array: np.ndarray) -> str:
    """SHA-256 of all elements in C order, as hexadecimal digits."""
    flat = np.asarray(array, order="C").reshape(-1)
    return digest_of_bytes(flat.view(np.uint8).data)


def digest_of_bytes(content: bytes | memoryview) -> str:
    """SHA-256 of a file's content, or a part of it, as hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()
