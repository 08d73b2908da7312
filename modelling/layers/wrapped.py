"""Modules around a layer, whose variables keep the names that they have in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import popxl_addons as addons
from popxl import Tensor
from popxl_addons import GraphWithNamedArgs, Module, NamedTensors
from popxl_addons.variable_factory import NamedVariableFactories


def rename_variables(
    facts: NamedVariableFactories, graph: GraphWithNamedArgs, name_of: Callable[[str], str]
) -> tuple[NamedVariableFactories, GraphWithNamedArgs]:
    """The variables of a graph under other names."""
    named = {name_of(n): f for n, f in facts.to_dict().items()}
    args = {name_of(n): t for n, t in graph.args.to_dict().items()}
    return (
        NamedVariableFactories.from_dict(named),
        GraphWithNamedArgs(
            graph.graph,
            NamedTensors.from_dict(args),
            called_graphs_grad_info=graph.called_graphs_grad_info,
        ),
    )


class LayerWrapper(Module):
    """A module around `layer`, whose variables are its own."""

    def __init__(self, layer: Module) -> None:
        super().__init__()
        self.layer = layer

    def create_graph(
        self, *args: Any, **kwargs: Any
    ) -> tuple[NamedVariableFactories, GraphWithNamedArgs]:
        """Like `Module.create_graph`, with the layer's names."""
        made = super().create_graph(*args, **kwargs)
        return rename_variables(*made, lambda name: name.removeprefix(self._prefix))

    @property
    def _graph_name(self) -> str:
        return layer_class_name(self.layer)

    @property
    def _prefix(self) -> str:
        inner = self.layer._prefix if isinstance(self.layer, LayerWrapper) else ""
        return f"layer.{inner}"


class PositionalInputs(LayerWrapper):
    """A module whose inputs are given by position, in another order than its own.

    Args:
        names: of the inputs, parameters of the layer's `build`.
    """

    def __init__(self, layer: Module, names: Sequence[str]) -> None:
        super().__init__(layer)
        self._names = names

    def build(self, *inputs: Tensor, seed: Tensor | None = None) -> Any:
        """The layer's result."""
        seeded = {} if seed is None else {"seed": seed}
        return self.layer(**dict(zip(self._names, inputs, strict=True)), **seeded)


def unwrap(module: addons.Module) -> addons.Module:
    """Return the layer inside, or the module itself."""
    return unwrap(module.layer) if isinstance(module, LayerWrapper) else module


def layer_class_name(module: addons.Module) -> str:
    """Return the name of a module's class, or of that of the layer inside."""
    return type(unwrap(module)).__name__
