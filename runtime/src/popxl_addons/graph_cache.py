"""Cache of graphs, keyed by the function that builds them and its arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable
from typing import Any

import popxl
from popxl import Tensor, TensorSpec, ops
from popxl.context import get_current_context
from popxl_addons.utils import OrderedDict


def bound_arguments(fn: Any, *args: Any, **kwargs: Any) -> OrderedDict[str, Any]:
    """Return arguments by parameter name, with defaults filled in."""
    target = fn.build if isinstance(fn, popxl.Module) else fn
    bound = inspect.signature(target).bind(*args, **kwargs)
    bound.apply_defaults()
    return OrderedDict(bound.arguments)


def tensor_hash(t: Tensor | TensorSpec) -> Hashable:
    """Hash key of a tensor argument: equal if the same graph can be called with either tensor."""
    return "tensor", t.shape, t.dtype, t.meta_shape, t.meta_shape.shards


def argument_hash(arg: Any) -> Hashable:
    """Hash key of an argument: equal if the function builds the same graph with either value.

    Objects that have a hash of their own but no equality are equal if their hashes are.

    Raises:
        TypeError: the argument is neither a tensor, a container of such, nor hashable.
    """
    if isinstance(arg, (Tensor, TensorSpec)):
        return tensor_hash(arg)
    if isinstance(arg, (list, tuple)):
        return tuple(argument_hash(a) for a in arg)
    if isinstance(arg, dict):
        return tuple((key, argument_hash(value)) for key, value in arg.items())
    try:
        hash(arg)
    except TypeError:
        raise TypeError(
            f"a graph cannot be cached for argument {arg!r}: {type(arg).__name__} is not hashable"
        ) from None
    # 1, 1.0 and True are equal to Python but not to a program, nor are 0.0 and -0.0; -1 and -2 have
    # one hash.
    if isinstance(arg, float):
        return type(arg), arg.hex()
    return type(arg), hash(arg) if type(arg).__eq__ is object.__eq__ else arg


def get_function_hash(fn: Any, *args: Any, **kwargs: Any) -> Hashable:
    """Hash key of the graph that `fn` builds; modules with equal hashes share graphs."""
    return type(fn), hash(fn), argument_hash(bound_arguments(fn, *args, **kwargs))


class GraphCache:
    """Cache of graphs, keyed by the function that builds them and its arguments."""

    def __init__(self) -> None:
        self._graphs: dict[Hashable, popxl.Graph] = {}
        self._functions: list[Any] = []  # kept alive, so that a hash is never used twice

    def find_graph(self, fn: Any, *args: Any, **kwargs: Any) -> popxl.Graph | None:
        """Return the graph cached for these arguments in the current Ir; None if there is none."""
        return self._graphs.get(self._cache_key(fn, args, kwargs))

    def create_graph(self, fn: Any, *args: Any, **kwargs: Any) -> popxl.Graph:
        """Create a graph as `ir.create_graph` does, or return the one cached for these arguments.

        Tensors are told apart by shape, dtype and meta_shape, other arguments by value. On another
        IPU or tile set it is another graph.
        """
        key = self._cache_key(fn, args, kwargs)
        if key not in self._graphs:
            self._graphs[key] = popxl.gcg().ir.create_graph(fn, *args, **kwargs)
            self._functions.append(fn)
        return self._graphs[key]

    @staticmethod
    def _cache_key(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
        context = get_current_context()
        place = context.ipu_id, context.io_tile_set
        return popxl.gcg().ir.id, place, get_function_hash(fn, *args, **kwargs)


def _tensors_of(arg: Any) -> list[Tensor]:
    if isinstance(arg, Tensor):
        return [arg]
    items = arg.values() if isinstance(arg, dict) else arg
    if isinstance(arg, (list, tuple, dict)):
        return [t for item in items for t in _tensors_of(item)]
    return []


def function(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: each call of `fn` calls a graph, cached by function and arguments.

    `fn` takes tensors (and hashable settings) and returns nothing, a tensor, or tensors.
    """
    cache = GraphCache()

    @functools.wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        graph = cache.create_graph(fn, *args, **kwargs)
        # Defaults are no tensors, so the arguments that were given hold all inputs in order.
        given = inspect.signature(fn).bind(*args, **kwargs).arguments
        outputs = ops.call(graph, *_tensors_of(given))
        if not outputs:
            return None
        return outputs[0] if len(outputs) == 1 else outputs

    return wrapped
