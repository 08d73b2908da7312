"""Registry through which IR classes call analyses without importing them.

An analysis attaches itself when it is imported, as `popxl.ops` attaches the operators of tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

analyses = SimpleNamespace()


def register_analysis(analysis: F) -> F:
    """Registers the decorated function, which the IR then calls as `analyses.<its name>`."""
    setattr(analyses, analysis.__name__, analysis)
    return analysis
