"""What tests of the core share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import popxl


@pytest.fixture
def ir() -> Iterator[popxl.Ir]:
    """A program whose main graph is active."""
    ir = popxl.Ir()
    with ir.main_graph:
        yield ir
