"""Graphs with named inputs, and graphs with some inputs bound to tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

import popxl
from popxl import ops
from popxl.ops import CallSiteInfo
from popxl.tensor import TensorLike
from popxl.transforms import GradGraphInfo
from popxl_addons.graph_common import CalledGraphsGradInfoLike, as_called_graphs_grad_info
from popxl_addons.named_tensors import NamedTensors, TensorMap

if TYPE_CHECKING:
    from popxl_addons.module import Module

Inputs = TensorLike | list[popxl.Tensor]
AutodiffMethod = Literal["auto", "build_grad", "autodiff"]


class _NamedValues:
    """Base class of named values with access by key or attribute; subclasses restrict access.

    Python's own attributes begin with an underscore.
    """

    def __init__(self) -> None:
        self._map: dict[str, Any] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._map

    def __getitem__(self, key: str) -> Any:
        raise NotImplementedError

    def __setitem__(self, key: str, value: Any) -> None:
        raise NotImplementedError

    def __getattr__(self, key: str) -> Any:
        if key.startswith("_"):
            raise AttributeError(key)
        try:
            return self[key]
        except KeyError as error:
            raise AttributeError(error.args[0]) from None

    def __setattr__(self, key: str, value: Any) -> None:
        if key.startswith("_"):
            object.__setattr__(self, key, value)
        else:
            self[key] = value


class Aux(_NamedValues):
    """Values that a module's `build` saves for its hand-written `build_grad`.

    They can be set while `build` runs, and read while `build_grad` runs; `in` works always.
    """

    def __init__(self) -> None:
        super().__init__()
        self._exposed = False  # whether the forward graph has outputs for them

    def __getitem__(self, key: str) -> Any:
        raise RuntimeError(f"aux[{key!r}] is read outside build_grad, where it has no value")

    def __setitem__(self, key: str, value: Any) -> None:
        self._map[key] = value


class VarGrad(_NamedValues):
    """Gradients of a module's variables, which its hand-written `build_grad` sets.

    Args:
        variables: of the forward graph; None where `build_grad` does not run.
    """

    def __init__(self, variables: NamedTensors | None = None) -> None:
        super().__init__()
        self._variables = None if variables is None else variables.to_dict()

    def _find_variable(self, name: str) -> popxl.Tensor:
        if self._variables is None:
            raise RuntimeError(f"var_grad[{name!r}] is used outside build_grad")
        if name not in self._variables:
            raise KeyError(f"there is no variable {name!r}: {list(self._variables)}")
        return self._variables[name]

    def __getitem__(self, key: str) -> popxl.Tensor:
        self._find_variable(key)
        if key not in self._map:
            raise KeyError(f"var_grad has no {key!r} yet")
        return self._map[key]

    def __setitem__(self, key: str, value: popxl.Tensor) -> None:
        variable = self._find_variable(key)
        if not isinstance(value, popxl.Tensor):
            raise TypeError(f"var_grad[{key!r}] must be a tensor, not {value!r}")
        check_same_spec(f"var_grad[{key!r}]", value, variable)
        self._map[key] = value


def check_same_spec(description: str, gradient: popxl.Tensor, t: popxl.Tensor) -> None:
    """Raise ValueError unless `gradient` has the shape of `t`; `description` names it."""
    if (gradient.shape, gradient.meta_shape) != (t.shape, t.meta_shape):
        raise ValueError(
            f"{description} must have shape {t.shape} and meta_shape {t.meta_shape}, but has "
            f"{gradient.shape} and {gradient.meta_shape}"
        )


class BoundGraph:
    """A graph with some inputs bound to tensors; a call passes the remaining inputs.

    Args:
        args: tensors of the graph that will call, by the input tensors of `graph`.
    """

    def __init__(self, graph: popxl.Graph, args: TensorMap | None = None) -> None:
        self.graph = graph
        self.args: dict[popxl.Tensor, popxl.Tensor] = dict(args or {})

    def call(self, *targs: Inputs, args: TensorMap | None = None) -> tuple[popxl.Tensor, ...]:
        """Call the graph with the unbound inputs; returns its outputs.

        Args:
            targs: tensors or numbers for the inputs that are not bound, in the order of the
                graph's inputs; lists are flattened.
            args: further tensors by graph input. They take precedence over bound ones.

        Raises:
            ValueError: too many or too few inputs.
        """
        return self.call_with_info(*targs, args=args).outputs

    def call_with_info(self, *targs: Inputs, args: TensorMap | None = None) -> CallSiteInfo:
        """Call the graph with its unbound inputs; returns the call op's `CallSiteInfo`."""
        merged = {**self.args, **(args or {})}
        return ops.call_with_info(self.graph, *targs, inputs_dict=merged)

    def bind(self, args: TensorMap) -> BoundGraph:
        """Return the graph with further inputs bound to tensors; later bindings take precedence."""
        return BoundGraph(self.graph, {**self.args, **args})

    def subgraph_io_map(
        self,
        *targs: popxl.Tensor,
        args: TensorMap | None = None,
        outs: Iterable[popxl.Tensor] | None = None,
    ) -> dict[popxl.Tensor, popxl.Tensor]:
        """Map inputs and, if `outs` is given, outputs of the graph to the caller's tensors."""
        merged = {**self.args, **(args or {})}
        free = [t for t in self.graph.inputs if t not in merged]
        pairs = dict(zip(free, targs, strict=False))
        return {**merged, **pairs, **dict(zip(self.graph.outputs, outs or (), strict=False))}


class GraphWithNamedArgs:
    """A graph, some of whose inputs have names.

    Args:
        args: the named inputs, tensors of `graph`.
        grad_graph_info: of a gradient graph: what it expects and returns.
        from_module: the module that built the graph.
        aux: what the module kept for its `build_grad`.
        called_graphs_grad_info: gradients to use for graphs that `graph` calls.

    Attributes:
        called_graphs_grad_info: a dict of them, which programs may change.
        autodiff_applied: whether `autodiff` has been called.
    """

    def __init__(
        self,
        graph: popxl.Graph,
        args: NamedTensors | None = None,
        grad_graph_info: GradGraphInfo | None = None,
        from_module: Module | None = None,
        aux: Aux | None = None,
        called_graphs_grad_info: CalledGraphsGradInfoLike | None = None,
    ) -> None:
        self.graph = graph
        self.args = NamedTensors() if args is None else args
        self._grad_graph_info = grad_graph_info
        self._from_module = from_module
        self._aux = Aux() if aux is None else aux
        self._build_outputs = graph.outputs  # without those that differentiating it adds
        self.called_graphs_grad_info = as_called_graphs_grad_info(called_graphs_grad_info)
        self.autodiff_applied = False

    @classmethod
    def from_grad_graph(
        cls, grad_graph_info: GradGraphInfo, args: NamedTensors | None = None
    ) -> GraphWithNamedArgs:
        """Wrap a gradient graph; `args` names some of its inputs."""
        return cls(grad_graph_info.graph, args, grad_graph_info)

    @property
    def grad_graph_info(self) -> GradGraphInfo:
        """The `GradGraphInfo` of a gradient graph. Raises AttributeError on another graph."""
        if self._grad_graph_info is None:
            raise AttributeError(f"graph {self.graph.id!r} is no gradient graph")
        return self._grad_graph_info

    @grad_graph_info.setter
    def grad_graph_info(self, info: GradGraphInfo) -> None:
        self._grad_graph_info = info

    # ---- calls ----------------------------------------------------------------------------------
    def bind(self, args: NamedTensors | None = None) -> BoundGraph:
        """Return a graph with named inputs bound to tensors by name; unknown names are ignored."""
        return BoundGraph(self.graph, {} if args is None else self.args.to_mapping(args))

    def call(self, *targs: Inputs, args: TensorMap | None = None) -> tuple[popxl.Tensor, ...]:
        """Call the graph and return its outputs; see `BoundGraph.call`."""
        return self.bind().call(*targs, args=args)

    def call_with_info(self, *targs: Inputs, args: TensorMap | None = None) -> CallSiteInfo:
        """Call the graph; returns the call op's `CallSiteInfo`."""
        return self.bind().call_with_info(*targs, args=args)

    # ---- gradients ------------------------------------------------------------------------------
    def autodiff(
        self,
        grads_provided: Iterable[popxl.Tensor] | None = None,
        grads_required: Iterable[popxl.Tensor] | None = None,
        called_graphs_grad_info: CalledGraphsGradInfoLike | None = None,
        method: AutodiffMethod = "auto",
        force: bool = False,
    ) -> GraphWithNamedArgs:
        """Create the gradient graph of this graph.

        Args:
            grads_provided: outputs whose gradients are given; default: all.
            grads_required: inputs whose gradients are wanted; default: all.
            called_graphs_grad_info: gradients for called graphs, besides those the graph knows.
            method: "build_grad": the module's own; "autodiff": the transform; "auto": the
                module's own if it has one.
            force: differentiate even though it has been done before.

        Raises:
            ValueError: it has been done before, the method is unknown, or the module has no
                `build_grad`.
        """
        if method not in get_args(AutodiffMethod):
            known = ", ".join(get_args(AutodiffMethod))
            raise ValueError(f"unknown method {method!r} of autodiff: use one of {known}")
        if self.autodiff_applied and not force:
            raise ValueError(
                f"graph {self.graph.id!r} has been differentiated already: reuse that gradient "
                "graph, or pass force=True"
            )
        module = self._from_module
        has_own = module is not None and module.implements_grad_graph
        if method == "build_grad" and not has_own:
            raise ValueError(f"graph {self.graph.id!r} comes from no module with `build_grad`")
        if has_own and method != "autodiff":
            assert module is not None
            result = module.create_grad_graph(self, grads_provided, grads_required)
        else:
            infos = {
                **as_called_graphs_grad_info(self.called_graphs_grad_info),
                **as_called_graphs_grad_info(called_graphs_grad_info),
            }
            info = popxl.transforms.autodiff(self.graph, grads_provided, grads_required, infos)
            assert isinstance(info, GradGraphInfo)
            result = GraphWithNamedArgs.from_grad_graph(info)
        self.autodiff_applied = True
        return result

    # ---- Python ---------------------------------------------------------------------------------
    def copy(self) -> GraphWithNamedArgs:
        """Return the same graph with a copied tree of input names."""
        out = GraphWithNamedArgs(
            self.graph,
            self.args.copy(),
            self._grad_graph_info,
            self._from_module,
            self._aux,
            self.called_graphs_grad_info,
        )
        out._build_outputs = self._build_outputs
        out.autodiff_applied = self.autodiff_applied
        return out

    def print_schedule(self) -> str:
        """Return the graph's ops in execution order as text."""
        return str(self.graph)

    def __repr__(self) -> str:
        return f"GraphWithNamedArgs({self.graph!r}, args={self.args.keys_flat()})"


def names_of(args: NamedTensors) -> Mapping[popxl.Tensor, str]:
    """Map each tensor of a tree of named tensors to its dotted name."""
    return {t: name for name, t in args.to_dict().items()}
