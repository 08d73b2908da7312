"""Default folder of the cache of compiled executables."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_VARIABLES = ("POPXL_CACHE_DIR", "POPART_CACHE_DIR")


def use_default_cache() -> None:
    """Set POPXL_CACHE_DIR to a folder in the user's cache, unless a cache is configured.

    The folder is `$XDG_CACHE_HOME/popxl/executables`, else `~/.cache/popxl/executables`. An empty
    variable disables the cache.

    The folder is made with mode 0700, since its files are run. Where it cannot be made there is no
    cache: it only saves time.
    """
    if any(name in os.environ for name in _VARIABLES):
        return
    with suppress(OSError, RuntimeError, ValueError):  # no home; a name that no path can have
        given = Path(os.environ.get("XDG_CACHE_HOME", ""))
        folder = (given if given.is_absolute() else Path.home() / ".cache") / "popxl/executables"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            os.environ[_VARIABLES[0]] = str(folder)
