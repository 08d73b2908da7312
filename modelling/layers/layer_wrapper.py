"""Modules that wrap a layer and keep the names of its variables."""

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
    """Renames the variables of a graph."""
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
    """A module around `layer`, whose variables have the names that the layer gives them."""

    def __init__(self, layer: Module) -> None:
        super().__init__()
        self.layer = layer

    def create_graph(
        self, *args: Any, **kwargs: Any
    ) -> tuple[NamedVariableFactories, GraphWithNamedArgs]:
        """Creates the graph as `Module.create_graph` does, with the layer's variable names."""
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
    """A layer whose inputs are passed by position, in another order than its own.

    Args:
        names: parameters of the layer's `build`, in the order of the inputs.
    """

    def __init__(self, layer: Module, names: Sequence[str]) -> None:
        super().__init__(layer)
        self._names = names

    def build(self, *inputs: Tensor, seed: Tensor | None = None) -> Any:
        """Returns the layer's outputs for inputs in the order of `names`."""
        kwargs = {} if seed is None else {"seed": seed}
        return self.layer(**dict(zip(self._names, inputs, strict=True)), **kwargs)


def unwrap(module: addons.Module) -> addons.Module:
    """Returns the innermost layer of nested wrappers, or the module itself if it is none."""
    return unwrap(module.layer) if isinstance(module, LayerWrapper) else module


def layer_class_name(module: addons.Module) -> str:
    """Returns the class name of a module, or of the layer that it wraps."""
    return type(unwrap(module)).__name__
