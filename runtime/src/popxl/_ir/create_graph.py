"""Tracing of a Python function into a graph, for `ir.create_graph`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from popxl.graph import Graph
from popxl.module import Module
from popxl.tensor import Tensor, TensorSpec
from popxl.typing_ import is_alias

if TYPE_CHECKING:
    from popxl.ir import Ir


def build_graph(
    ir: Ir, fn: Callable[..., Any] | Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Graph:
    """Calls `fn` with graph inputs in place of its tensor arguments and returns the new graph."""
    target = fn.build if isinstance(fn, Module) else fn
    if not callable(fn):
        raise TypeError(f"create_graph: fn must be a function or a Module, not {fn!r}")
    with ir._new_current_graph(_function_name(fn)) as graph:
        try:
            bound = _signature(target).bind(*args, **kwargs)
        except TypeError as error:
            raise ValueError(
                f"the arguments do not fit those of graph {graph.id!r}: {error}"
            ) from None
        for name, parameter in bound.signature.parameters.items():
            if name in bound.arguments:
                by_ref = is_alias(parameter.annotation, "TensorByRef")
                bound.arguments[name] = _replace_by_graph_inputs(
                    graph, bound.arguments[name], name, by_ref, parameter.kind
                )
        outputs = fn(*bound.args, **bound.kwargs)
        for tensor in _as_tensors(outputs, graph):
            graph._add_output(tensor)
    return graph


def _signature(target: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(target)
    except ValueError:  # a class or function of Python's own
        raise TypeError(f"{target!r} has no signature: pass a function of tensors") from None


def _function_name(fn: Callable[..., Any] | Module) -> str:
    default = type(fn).__qualname__
    name = fn._graph_name if isinstance(fn, Module) else getattr(fn, "__qualname__", default)
    return name.replace("<locals>.", "")


def _replace_by_graph_inputs(
    graph: Graph, value: Any, name: str, by_ref: bool, kind: Any = None
) -> Any:
    """Replaces the tensors and specs in an argument `value` by inputs of `graph`."""
    if isinstance(value, Tensor):
        if value.ir is not graph.ir:
            raise ValueError(
                f"create_graph: tensor {value.id!r} belongs to another Ir ({value.ir!r}): pass its "
                "spec"
            )
        return graph._add_input(value.spec, name, by_ref)
    if isinstance(value, TensorSpec):
        return graph._add_input(value, name, by_ref)
    if isinstance(value, (list, tuple)) and _has_tensors(value):
        _check_all_or_no_tensors(value, name)
        items = [
            _replace_by_graph_inputs(graph, v, f"{name}_{i}", by_ref) for i, v in enumerate(value)
        ]
        return tuple(items) if isinstance(value, tuple) else items
    if kind is inspect.Parameter.VAR_KEYWORD:
        return {k: _replace_by_graph_inputs(graph, v, k, by_ref) for k, v in value.items()}
    return value


def _has_tensors(items: Iterable[Any]) -> bool:
    return any(
        isinstance(v, (Tensor, TensorSpec)) or (isinstance(v, (list, tuple)) and _has_tensors(v))
        for v in items
    )


def _check_all_or_no_tensors(items: Iterable[Any], name: str) -> None:
    """Raises TypeError if a list argument of `fn` mixes tensors with other values."""
    for item in items:
        nested = isinstance(item, (list, tuple)) and _has_tensors(item)
        if not (nested or isinstance(item, (Tensor, TensorSpec))):
            raise TypeError(
                f"argument {name!r} holds tensors, which become inputs of the graph, and {item!r}: "
                "pass them as arguments of their own"
            )


def _as_tensors(outputs: Any, graph: Graph) -> list[Tensor]:
    if outputs is None:
        return []
    if isinstance(outputs, Tensor):
        return [outputs]
    is_iterable = isinstance(outputs, Iterable) and not isinstance(outputs, (str, Mapping))
    tensors = list(outputs) if is_iterable else [outputs]
    for t in tensors:
        if not isinstance(t, Tensor):
            raise ValueError(
                f"the function of graph {graph.id!r} must return tensors, but returned {t!r}"
            )
    return tensors
