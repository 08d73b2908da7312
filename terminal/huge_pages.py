"""Huge pages for malloc, enabled in glibc before the process starts.

XLA's CPU client takes memory for each result from malloc and soon returns it, so that the kernel
clears fresh pages all the time. In pages of 2 MB instead of 4 kB that takes less of the processor's
time: `kernel_fraction` of `benchmarks.disk_offload`. See "Memory Allocation Tunables" in the manual
of the GNU C library.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

_VARIABLE, _TUNABLE = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def with_huge_pages(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables with huge pages enabled, unless they are configured."""
    given = environment.get(_VARIABLE, "")
    if _TUNABLE in given:
        return dict(environment)
    return {**environment, _VARIABLE: ":".join(filter(None, [given, f"{_TUNABLE}=1"]))}


def restart_with_huge_pages() -> None:
    """Restarts this process with huge pages, if the system gives them on request.

    The process keeps its number. To be called first, before anything is opened or said. A script
    that came through standard input is gone, and goes on as it is.
    """
    environment, script = with_huge_pages(os.environ), Path(sys.argv[0])
    if environment == dict(os.environ) or sys.gettrace() is not None:
        return
    if not (script.is_file() and _has_huge_pages_on_request()):
        return
    with suppress(OSError):  # where programs may not be started, it goes on as it is
        os.execve(sys.executable, sys.orig_argv, environment)


def _has_huge_pages_on_request() -> bool:
    try:
        return "[madvise]" in _SETTING.read_text("utf-8") and "glibc" in (
            os.confstr("CS_GNU_LIBC_VERSION") or ""
        )
    except (OSError, ValueError):  # no Linux, or another C library
        return False
