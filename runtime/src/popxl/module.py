"""Base class of callables that build graphs, like a layer class in other frameworks."""

from __future__ import annotations

from typing import Any


class Module:
    """A callable whose `build` method adds ops to the current graph.

    Subclass it, write `build`, and pass an instance to `ir.create_graph` or call it.
    """

    @property
    def _graph_name(self) -> str:
        """Name of the graphs that are created from the module."""
        return type(self).__qualname__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.build(*args, **kwargs)

    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Adds the module's ops to the current graph; must be overridden."""
        raise NotImplementedError(f"{type(self).__qualname__} must implement `build`")
