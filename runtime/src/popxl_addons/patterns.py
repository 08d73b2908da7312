"""PopART's pattern pass for tensor-parallel collectives; part of its API."""

from __future__ import annotations

from typing import Literal, get_args

from popxl import Ir

PatternsLevel = Literal["no_patterns", "minimal", "default", "all"]


def apply_pre_alias_patterns(ir: Ir, level: PatternsLevel = "default") -> None:
    """Prepare the tensor-parallel collectives of `ir` for a session.

    XLA does the simplifications that PopART's patterns stand for, so no graph changes and levels
    differ in nothing; but a session refuses a program with `ops.replicated_all_reduce_TP` or
    strided collectives that has not come through here, as PopART does.

    Raises:
        ValueError: an unknown level.
    """
    if level not in get_args(PatternsLevel):
        raise ValueError(
            f"unknown level {level!r}: use one of {', '.join(get_args(PatternsLevel))}"
        )
    ir._patterns_applied = True  # type: ignore[attr-defined]  # read by popxl.Session
