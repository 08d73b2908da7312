"""Gradient graphs of modules that write their gradient themselves, in `build_grad`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import popxl
from popxl import Tensor
from popxl_addons.grad_info import Connection, fwd, fwd_grad, make_grad_graph_info
from popxl_addons.graph import Aux, GraphWithNamedArgs
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.utils import suffix_graph_name

if TYPE_CHECKING:
    from popxl_addons.module import Module


def written_gradient(
    module: Module,
    fwd_graph: GraphWithNamedArgs,
    provided: Sequence[Tensor],
    required: Sequence[Tensor] | None,
) -> GraphWithNamedArgs:
    """See `Module.create_grad_graph`."""
    forward = fwd_graph.graph
    graph = forward.ir.create_empty_graph(suffix_graph_name(forward.name, "grad"))
    with graph:
        grads = [_input_like(t, "grad_") for t in provided]
        values = _ForwardValues(forward)
        module.aux, module.var_grad = Aux(values.replaced(fwd_graph._aux)), NamedTensors()
        by_input = _by_input(module, fwd_graph, _as_list(module.build_grad(*grads)))
        wanted = list(by_input if required is None else required)
        missing = [t.name for t in wanted if t not in by_input]
        if missing:
            raise ValueError(
                f"build_grad of {type(module).__qualname__} gives no gradient of {missing}"
            )
        for t in wanted:
            popxl.graph_output(by_input[t])
    expected = [*map(fwd_grad, provided), *values.connections]
    info = make_grad_graph_info(graph, forward, expected, [fwd_grad(t) for t in wanted])
    return GraphWithNamedArgs.from_grad_graph(info)


class _ForwardValues:
    """Inputs of the current graph, made for those tensors of the forward graph that it needs.

    Attributes:
        connections: what the inputs are, in their order.
    """

    def __init__(self, forward: popxl.Graph) -> None:
        self.connections: list[Connection] = []
        self._forward = forward
        self._made: dict[Tensor, Tensor] = {}

    def replaced(self, value: Any) -> Any:
        """What `build` kept, with inputs in the place of forward tensors."""
        if isinstance(value, Tensor):
            if value not in self._made:
                self._made[value] = self._input(value)
            return self._made[value]
        if isinstance(value, Mapping):
            return {key: self.replaced(v) for key, v in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self.replaced(v) for v in value)
        return value

    def _input(self, t: Tensor) -> Tensor:
        self.connections.append(fwd(t))
        if t not in (*self._forward.inputs, *self._forward.outputs):
            with self._forward:
                popxl.graph_output(t)
        return _input_like(t, "fwd_")


def _by_input(
    module: Module, fwd_graph: GraphWithNamedArgs, results: Sequence[Tensor | None]
) -> dict[Tensor, Tensor]:
    """Gradients by input of the forward graph."""
    named = set(fwd_graph.args.tensors)
    positional = [t for t in fwd_graph.graph.inputs if t not in named]
    if len(results) > len(positional):
        raise ValueError(
            f"build_grad of {type(module).__qualname__} returns {len(results)} gradients, but "
            f"the graph has {len(positional)} inputs besides its variables"
        )
    found = {t: g for t, g in zip(positional, results, strict=False) if g is not None}
    found.update(fwd_graph.args.to_mapping(module.var_grad))
    return found


def _input_like(t: Tensor, prefix: str) -> Tensor:
    name = prefix + t.name.replace("/", "_")
    return popxl.graph_input(t.shape, t.dtype, name, meta_shape=t.meta_shape)


def _as_list(outputs: Any) -> list[Any]:
    if outputs is None or isinstance(outputs, Tensor):
        return [] if outputs is None else [outputs]
    return list(outputs)
