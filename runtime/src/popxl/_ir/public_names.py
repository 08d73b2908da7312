"""Names for a package's `__all__`."""

from __future__ import annotations

from types import ModuleType
from typing import Any


def collect_public_names(package: dict[str, Any]) -> list[str]:
    """Returns the names that a package imports from its modules, for its `__all__`.

    Args:
        package: its `globals()`.
    """
    return sorted(
        name
        for name, value in package.items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    )
