"""What is found about graphs is found once, however many calls lead to a graph and however deep
they are nested."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from functools import wraps
from threading import local
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from popxl.graph import Graph

S = TypeVar("S")
T = TypeVar("T")


class _DepthExceeded(BaseException):
    """What is asked for, as `Memo.get_or_compute` is given it, has to be made first."""


class Memo(local):
    """Results that are made of others of their kind, as those of a graph are of those of the graphs
    that it runs, without Python's stack growing with the depth."""

    MAX_DEPTH = 20  # results under way, of which each waits for the next

    def __init__(self) -> None:
        self._depth = 0

    def get_or_compute(self, results: MutableMapping[Any, T], key: Any, make: Callable[[], T]) -> T:
        """What `results` has for `key`, or else what `make` gives, from now on.

        What is asked for too deep is made before what waits for it, which begins again: `make` has
        no effects that would be wrong twice.
        """
        if key in results:
            return results[key]
        if self._depth == self.MAX_DEPTH:
            raise _DepthExceeded(results, key, make)
        if self._depth:
            return self._compute(results, key, make)
        stack = [(results, key, make)]
        while stack:
            try:
                self._compute(*stack[-1])
                stack.pop()
            except _DepthExceeded as exceeded:
                stack.append(exceeded.args)
        return results[key]

    def _compute(self, results: MutableMapping[Any, T], key: Any, make: Callable[[], T]) -> T:
        self._depth += 1
        try:
            made = make()
        finally:
            self._depth -= 1
        return results.setdefault(key, made)


_ANALYSES = Memo()


class graph_cached_property(Generic[S, T]):  # noqa: N801 - used as `cached_property` is
    """A property that is found once, of graphs that run others."""

    def __init__(self, find: Callable[[S], T]) -> None:
        self._find = find
        self.__doc__ = find.__doc__

    def __get__(self, graph: S, kind: type[S] | None = None) -> T:
        name = self._find.__name__
        return _ANALYSES.get_or_compute(graph.__dict__, name, lambda: self._find(graph))


def graph_cached(analysis: Callable[..., T]) -> Callable[..., T]:
    """Remember what `analysis(graph, *about)` finds until the graph, or one that it runs, changes
    (`Graph._changes`). Nobody may change what is returned. Of threads that ask at once, all
    get what one of them found.
    """

    @wraps(analysis)
    def cached(graph: Graph, *about: Any) -> Any:
        key = (cached, *about)
        return _ANALYSES.get_or_compute(graph._known, key, lambda: analysis(graph, *about))

    return cached


_KEPT = 2**14


def get_cached(cache: dict[Any, T], key: Any, make: Callable[[], T]) -> T:
    """What `make` gives for `key`, once while the cache, which begins anew when full, has it."""
    results = cache.get(key)
    if results is not None:
        return results
    made = make()
    if len(cache) >= _KEPT:
        cache.clear()
    cache[key] = made
    return made
