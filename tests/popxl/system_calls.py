"""System calls that the kernel itself refuses, as it would on another machine."""

from __future__ import annotations

import ctypes
import os
import platform
import struct

import pytest

_FALLOCATE = {"x86_64": 285, "aarch64": 47}
_LOAD, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06  # instructions of a seccomp filter
_ERROR, _ALLOW = 0x00050000, 0x7FFF0000
_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER = 38, 22, 2


def refuse_fallocate(reason: int) -> None:
    """Makes `fallocate` fail in this thread and in threads that it starts."""
    number = _FALLOCATE.get(platform.machine())
    if number is None:
        pytest.skip(f"nobody has looked up the number of fallocate on {platform.machine()}")
    steps = [
        (_LOAD, 0, 0, 0),  # the number of the call
        (_IF_EQUAL, 0, 1, number),  # else skip one
        (_RETURN, 0, 0, _ERROR | reason),
        (_RETURN, 0, 0, _ALLOW),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("HP", len(steps), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    if libc.prctl(_SET_SECCOMP, _FILTER, program, 0, 0):
        pytest.skip(f"no filters of system calls here: {os.strerror(ctypes.get_errno())}")
