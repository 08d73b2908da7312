"""Hints to a matmul planner that XLA does not have."""

from __future__ import annotations

import popxl

__all__ = ["disable_fc_pass", "enable_fc_pass"]


def disable_fc_pass(ir: popxl.Ir) -> None:
    """Accepted; no effect: XLA plans the matmuls of a layer's passes itself."""


def enable_fc_pass(ir: popxl.Ir) -> None:
    """Accepted; no effect. See `disable_fc_pass`."""
