"""The line that says what compiling took."""

from __future__ import annotations

import pytest

from popxl._compile.executable_cache import StartupStats
from sessions.session import format_executable_origin


@pytest.mark.parametrize(
    ("from_cache", "traces", "compiles", "text"),
    [
        (True, 0, 0, "the executable came from the cache (0 traces, 0 compilations)"),
        (True, 9, 7, "compiled what the cache does not have (9 traces, 7 compilations)"),
        (False, 9, 9, "compiled (9 traces, 9 compilations)"),
    ],
)
def test_what_was_compiled_did_not_come_from_the_cache(
    from_cache: bool, traces: int, compiles: int, text: str
) -> None:
    assert format_executable_origin(StartupStats(1.0, from_cache, traces, compiles)) == text
