"""What is found about graphs is found once, however many calls lead to a graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from popxl.graph import Graph

T = TypeVar("T")


def found_once(analysis: Callable[..., T]) -> Callable[..., T]:
    """Remember what `analysis(graph, *about)` finds until the graph, or one that it runs, changes
    (`Graph._changes`). Nobody may change what is returned. Of threads that ask at once, all
    get what one of them found.
    """

    @wraps(analysis)
    def remembered(graph: Graph, *about: Any) -> Any:
        known, key = graph._known, (remembered, *about)
        return known[key] if key in known else known.setdefault(key, analysis(graph, *about))

    return remembered


_KEPT = 2**14


def recent(cache: dict[Any, T], key: Any, make: Callable[[], T]) -> T:
    """What `make` gives for `key`, once while the cache, which begins anew when full, has it."""
    known = cache.get(key)
    if known is not None:
        return known
    made = make()
    if len(cache) >= _KEPT:
        cache.clear()
    cache[key] = made
    return made
