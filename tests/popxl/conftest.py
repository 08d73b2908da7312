"""Fixtures of the runtime's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import popxl
from tests.conftest import compile_quickly


@pytest.fixture
def ir() -> Iterator[popxl.Ir]:
    """A program whose main graph is active."""
    ir = popxl.Ir()
    with ir.main_graph:
        yield ir


@pytest.fixture
def compiled_quickly(request: pytest.FixtureRequest) -> None:
    """Compiles without optimizations, for tests that do not depend on XLA's output."""
    compile_quickly(request.node.get_closest_marker("optimised") is None)
