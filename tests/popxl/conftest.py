"""What tests of the core share."""

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
    """For tests of what a program is made into, whatever XLA makes of that."""
    compile_quickly(request.node.get_closest_marker("optimised") is None)
