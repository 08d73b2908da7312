"""Memoization of analyses: each graph is analyzed once, at any depth of nested calls."""

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
    """Unwinds the stack when nested calls are too deep; carries the key to compute first."""


class Memo(local):
    """Memoized recursion over nested graphs, without growing Python's stack."""

    MAX_DEPTH = 20  # results under way, of which each waits for the next

    def __init__(self) -> None:
        self._depth = 0

    def get_or_compute(
        self, results: MutableMapping[Any, T], key: Any, compute: Callable[[], T]
    ) -> T:
        """Returns `results[key]`, computed by `compute` on first use.

        A computation nested too deep runs first, and its callers start again, so `compute` must not
        have effects that would be wrong twice.
        """
        if key in results:
            return results[key]
        if self._depth == self.MAX_DEPTH:
            raise _DepthExceeded(results, key, compute)
        if self._depth:
            return self._compute(results, key, compute)
        stack = [(results, key, compute)]
        while stack:
            try:
                self._compute(*stack[-1])
                stack.pop()
            except _DepthExceeded as exceeded:
                stack.append(exceeded.args)
        return results[key]

    def _compute(self, results: MutableMapping[Any, T], key: Any, compute: Callable[[], T]) -> T:
        self._depth += 1
        try:
            result = compute()
        finally:
            self._depth -= 1
        return results.setdefault(key, result)


_ANALYSES = Memo()


class graph_cached_property(Generic[S, T]):  # noqa: N801 - used as `cached_property` is
    """A cached property of graphs, invalidated when the graph or a graph that it calls changes."""

    def __init__(self, find: Callable[[S], T]) -> None:
        self._find = find
        self.__doc__ = find.__doc__

    def __get__(self, graph: S, kind: type[S] | None = None) -> T:
        name = self._find.__name__
        return _ANALYSES.get_or_compute(graph.__dict__, name, lambda: self._find(graph))


def graph_cached(analysis: Callable[..., T]) -> Callable[..., T]:
    """Decorates `analysis(graph, *args)`: caches its result until the graph or a callee changes."""

    @wraps(analysis)
    def cached(graph: Graph, *args: Any) -> Any:
        key = (cached, *args)
        return _ANALYSES.get_or_compute(graph._known, key, lambda: analysis(graph, *args))

    return cached


_MAX_ENTRIES = 2**14


def get_cached(cache: dict[Any, T], key: Any, compute: Callable[[], T]) -> T:
    """Returns `cache[key]`, computed by `compute` on a miss; a full cache is cleared."""
    results = cache.get(key)
    if results is not None:
        return results
    result = compute()
    if len(cache) >= _MAX_ENTRIES:
        cache.clear()
    cache[key] = result
    return result
