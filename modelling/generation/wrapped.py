"""Modules around a layer, whose variables keep the names that they have in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from popxl_addons import GraphWithNamedArgs, Module, NamedTensors
from popxl_addons.variable_factory import NamedVariableFactories


def renamed(
    facts: NamedVariableFactories, graph: GraphWithNamedArgs, name_of: Callable[[str], str]
) -> tuple[NamedVariableFactories, GraphWithNamedArgs]:
    """The variables of a graph under other names."""
    named = {name_of(n): f for n, f in facts.to_dict().items()}
    args = {name_of(n): t for n, t in graph.args.to_dict().items()}
    return (
        NamedVariableFactories.from_dict(named),
        GraphWithNamedArgs(graph.graph, NamedTensors.from_dict(args)),
    )


class Wrapped(Module):
    """A module around `layer`, whose variables are its own."""

    def __init__(self, layer: Module) -> None:
        super().__init__()
        self.layer = layer

    def create_graph(
        self, *args: Any, **kwargs: Any
    ) -> tuple[NamedVariableFactories, GraphWithNamedArgs]:
        """Like `Module.create_graph`, with the layer's names."""
        made = super().create_graph(*args, **kwargs)
        return renamed(*made, lambda name: name.removeprefix(self._prefix))

    @property
    def _prefix(self) -> str:
        inner = self.layer._prefix if isinstance(self.layer, Wrapped) else ""
        return f"layer.{inner}"
