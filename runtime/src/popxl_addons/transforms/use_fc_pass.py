"""Hints for PopART's matmul planner, without effect on XLA."""

from __future__ import annotations

import popxl

__all__ = ["disable_fc_pass", "enable_fc_pass"]


def disable_fc_pass(ir: popxl.Ir) -> None:
    """Hint without effect: XLA plans the matmuls of all passes itself."""


def enable_fc_pass(ir: popxl.Ir) -> None:
    """Hint without effect; see `disable_fc_pass`."""
