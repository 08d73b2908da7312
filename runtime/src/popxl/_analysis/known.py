"""What is found about graphs is found once, however many calls lead to a graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from popxl.graph import Graph

T = TypeVar("T")


def found_once(analysis: Callable[[Graph], T]) -> Callable[[Graph], T]:
    """Remember what `analysis` finds about a graph until the graph, or one that it runs, changes
    (`Graph._changes`). Nobody may change what is returned."""

    @wraps(analysis)
    def remembered(graph: Graph) -> Any:
        if remembered not in graph._known:
            graph._known[remembered] = analysis(graph)
        return graph._known[remembered]

    return remembered
