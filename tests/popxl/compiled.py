"""Access to the HLO of a session's segments."""

from __future__ import annotations

from typing import Any

import popxl


def executables(session: popxl.Session) -> list[Any]:
    """The executables, each once, in the order of the segments."""
    return list(dict.fromkeys(session._program.executables.values()))


def optimised(session: popxl.Session) -> str:
    """The optimised HLO of all segments."""
    return "\n".join(e.as_text() for e in executables(session))


def temporary_bytes(session: popxl.Session) -> int:
    """The most memory that a segment takes besides its arguments and results."""
    return max(e.memory_analysis().temp_size_in_bytes for e in executables(session))
