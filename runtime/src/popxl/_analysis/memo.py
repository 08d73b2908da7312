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


class _Deeper(BaseException):
    """What is asked for, as `Deep.once` is given it, has to be made first."""


class Deep(local):
    """Results that are made of others of their kind, as those of a graph are of those of the graphs
    that it runs, without Python's stack growing with the depth."""

    DEEPEST = 20  # results under way, of which each waits for the next

    def __init__(self) -> None:
        self._depth = 0

    def once(self, known: MutableMapping[Any, T], key: Any, make: Callable[[], T]) -> T:
        """What `known` has for `key`, or else what `make` gives, from now on.

        What is asked for too deep is made before what waits for it, which begins again: `make` has
        no effects that would be wrong twice.
        """
        if key in known:
            return known[key]
        if self._depth == self.DEEPEST:
            raise _Deeper(known, key, make)
        if self._depth:
            return self._made(known, key, make)
        waiting = [(known, key, make)]
        while waiting:
            try:
                self._made(*waiting[-1])
                waiting.pop()
            except _Deeper as deeper:
                waiting.append(deeper.args)
        return known[key]

    def _made(self, known: MutableMapping[Any, T], key: Any, make: Callable[[], T]) -> T:
        self._depth += 1
        try:
            made = make()
        finally:
            self._depth -= 1
        return known.setdefault(key, made)


_ANALYSES = Deep()


class found_property(Generic[S, T]):  # noqa: N801 - used as `cached_property` is
    """A property that is found once, of graphs that run others."""

    def __init__(self, find: Callable[[S], T]) -> None:
        self._find = find
        self.__doc__ = find.__doc__

    def __get__(self, graph: S, kind: type[S] | None = None) -> T:
        name = self._find.__name__
        return _ANALYSES.once(graph.__dict__, name, lambda: self._find(graph))


def found_once(analysis: Callable[..., T]) -> Callable[..., T]:
    """Remember what `analysis(graph, *about)` finds until the graph, or one that it runs, changes
    (`Graph._changes`). Nobody may change what is returned. Of threads that ask at once, all
    get what one of them found.
    """

    @wraps(analysis)
    def remembered(graph: Graph, *about: Any) -> Any:
        key = (remembered, *about)
        return _ANALYSES.once(graph._known, key, lambda: analysis(graph, *about))

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
