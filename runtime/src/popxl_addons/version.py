"""The version of the package."""

from __future__ import annotations

from importlib import metadata


def _installed_version() -> str:
    try:
        return metadata.version("popxl-xla")
    except metadata.PackageNotFoundError:  # run from the source tree
        return "unknown"


__version__ = _installed_version()
GIT_COMMIT = f"popxl-xla {__version__}"
"""Version that programs log."""
