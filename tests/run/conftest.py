"""Fixtures shared by tests of runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.small_runs import few_examples


@pytest.fixture(scope="module")
def few(executables: Path) -> Iterator[None]:
    """Few examples, and programs that are compiled once."""
    with few_examples(executables):
        yield
