"""Cases that repeat what others of their test show, for other sizes or layouts."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*case: Any) -> Any:
    """A case of `pytest.mark.parametrize` that only runs with `-m slow`."""
    return pytest.param(*case, marks=pytest.mark.slow)


def one_of_many(*case: Any) -> Any:
    """A slow case of so many that compiling them takes most of the time: XLA optimises little."""
    return pytest.param(*case, marks=[pytest.mark.slow, pytest.mark.quickly])
