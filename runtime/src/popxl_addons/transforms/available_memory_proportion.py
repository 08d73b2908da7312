"""Hints about temporary memory that XLA does not need."""

from __future__ import annotations

from collections.abc import Iterable

import popxl

__all__ = ["set_available_memory_proportion_by_ipu", "set_graph_available_memory_proportion_by_ipu"]


def _check(proportions: Iterable[float]) -> None:
    bad = [p for p in proportions if not 0 < p <= 1]
    if bad:
        raise ValueError(f"available memory proportions must be in (0, 1], but got {bad}")


def set_available_memory_proportion_by_ipu(ir: popxl.Ir, proportions: Iterable[float]) -> None:
    """Accepted; no effect: XLA plans temporary memory itself.

    Raises:
        ValueError: a proportion is not in (0, 1].
    """
    _check(proportions)


def set_graph_available_memory_proportion_by_ipu(
    graph: popxl.Graph, proportions: Iterable[float]
) -> None:
    """Accepted; no effect. See `set_available_memory_proportion_by_ipu`."""
    _check(proportions)
