"""Available memory proportions, recorded as op attributes; XLA manages temporaries itself."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING

import popxl

if TYPE_CHECKING:
    from popxl._ir.op_registry import OpDef

__all__ = ["set_available_memory_proportion_by_ipu", "set_graph_available_memory_proportion_by_ipu"]

_ATTRIBUTE = "available_memory_proportion"


def set_available_memory_proportion_by_ipu(ir: popxl.Ir, proportions: Iterable[float]) -> None:
    """Set `available_memory_proportion` of all ops of a program that have the attribute.

    Matrix products, gathers, scatters and the like show it in `print(graph)`; it has no effect on
    XLA. Ops that were given one keep theirs.

    Args:
        proportions: one for each virtual device, in (0, 1].

    Raises:
        ValueError: a proportion is not in (0, 1], or an op's device has none.
    """
    proportions = _check_proportions(proportions)
    for graph in ir._graphs:
        _set_in_graph(graph, proportions)


def set_graph_available_memory_proportion_by_ipu(
    graph: popxl.Graph, proportions: Iterable[float]
) -> None:
    """Set `available_memory_proportion` of one graph's ops, without those of graphs it calls."""
    _set_in_graph(graph, _check_proportions(proportions))


def _check_proportions(proportions: Iterable[float]) -> list[float]:
    values = [float(p) for p in proportions]
    bad = [p for p in values if not 0 < p <= 1]
    if bad:
        raise ValueError(f"available memory proportions must be in (0, 1], but got {bad}")
    return values


def _set_in_graph(graph: popxl.Graph, proportions: list[float]) -> None:
    ops = [op for op in graph.ops if _takes_proportion(op.defn)]
    for op in ops:
        ipu = op.ipu or 0
        if ipu >= len(proportions):
            raise ValueError(
                f"{op.defn.name} is on IPU {ipu}, but there are {len(proportions)} available "
                "memory proportions: give one for each IPU"
            )
        op.attrs.setdefault(_ATTRIBUTE, proportions[ipu])
    if ops:
        graph._invalidate_analyses()


@cache
def _takes_proportion(definition: OpDef) -> bool:
    return (
        definition.lower is not None
        and _ATTRIBUTE in inspect.signature(definition.lower).parameters
    )
