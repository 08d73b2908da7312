"""Modules that wrap a layer without changing the names of its variables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import popxl_addons as addons
from popxl import Tensor
from popxl_addons import GraphWithNamedArgs, Module, NamedTensors
from popxl_addons.variable_factory import NamedVariableFactories


def rename_variables(
    facts: NamedVariableFactories, graph: GraphWithNamedArgs, rename: Callable[[str], str]
) -> tuple[NamedVariableFactories, GraphWithNamedArgs]:
    """Renames a graph's variables by the function `rename`."""
    factories = {rename(n): f for n, f in facts.to_dict().items()}
    args = {rename(n): t for n, t in graph.args.to_dict().items()}
    return (
        NamedVariableFactories.from_dict(factories),
        GraphWithNamedArgs(
            graph.graph,
            NamedTensors.from_dict(args),
            called_graphs_grad_info=graph.called_graphs_grad_info,
        ),
    )


class LayerWrapper(Module):
    """Base class of modules that wrap `layer` and keep its variable names."""

    def __init__(self, layer: Module) -> None:
        super().__init__()
        self.layer = layer

    def create_graph(
        self, *args: Any, **kwargs: Any
    ) -> tuple[NamedVariableFactories, GraphWithNamedArgs]:
        """Creates the graph of the wrapper, with the wrapped layer's variable names."""
        facts, graph = super().create_graph(*args, **kwargs)
        return rename_variables(facts, graph, lambda name: name.removeprefix(self._prefix))

    @property
    def _graph_name(self) -> str:
        return layer_class_name(self.layer)

    @property
    def _prefix(self) -> str:
        inner = self.layer._prefix if isinstance(self.layer, LayerWrapper) else ""
        return f"layer.{inner}"


class PositionalInputs(LayerWrapper):
    """Wraps a layer so that its inputs are passed by position, in the order of `names`.

    Args:
        names: parameters of the layer's `build`, in the order of the inputs.
    """

    def __init__(self, layer: Module, names: Sequence[str]) -> None:
        super().__init__(layer)
        self._names = names

    def build(self, *inputs: Tensor, seed: Tensor | None = None) -> Any:
        """Runs the wrapped layer on inputs in the order of `names`."""
        kwargs = {} if seed is None else {"seed": seed}
        return self.layer(**dict(zip(self._names, inputs, strict=True)), **kwargs)


def unwrap_layer(module: addons.Module) -> addons.Module:
    """Returns the innermost layer of nested wrappers; `module` itself if it is no wrapper."""
    return unwrap_layer(module.layer) if isinstance(module, LayerWrapper) else module


def layer_class_name(module: addons.Module) -> str:
    """Returns the class name of the innermost layer that a module wraps."""
    return type(unwrap_layer(module)).__name__
