"""Graphs: lists of ops with inputs and outputs, which other graphs can call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from popxl import context
from popxl._ir.analysis_registry import analyses
from popxl._ir.argument_checks import check_type
from popxl._ir.regions import regions
from popxl.errors import SpecError
from popxl.tensor import Constant, Shard, Tensor, TensorSpec, Variable

if TYPE_CHECKING:
    from popxl._ir.op import Op
    from popxl.ir import Ir


@dataclass(frozen=True)
class OutlineInfo:
    """Mark of a graph that is compiled as a separate executable (`popxl.transforms.outline`)."""

    saved: tuple[Tensor, ...]


class Graph:
    """List of ops with inputs and outputs; made by `ir.create_graph`, `ir.create_empty_graph`."""

    _ir_: Ir
    _name: str
    _ops: list[Op]
    _inputs: list[Tensor]
    _outputs: list[Tensor]
    _tensors: dict[str, Tensor]  # by name, in order of creation
    _taken: dict[str, int]  # how many numbered names there are of a name
    _scopes: list[str]  # name scopes that are open
    _call_sites: list[Op]  # ops that run this graph
    _users: dict[Graph, None]  # graphs that run this one, or differentiate it
    _routed: dict[tuple[Tensor, bool], Tensor]  # inputs for tensors of callers; by reference or not
    _known: dict[Any, Any]  # what analyses found: see `_analysis.known`
    _hooks: dict[int, Callable[[Op], Any]]
    _gradient_is_written: bool  # by hand, so that autodiff of a caller must be given it
    _written_gradients: dict[Graph, Any]  # those of called graphs, which modules note here
    _outlined: OutlineInfo | None  # compiled apart, wherever it is called
    _changed_at: int  # how many changes of the Ir's graphs there were, its own latest included

    def __init__(self) -> None:
        raise TypeError("Cannot create popxl.Graph instances directly; use ir.create_graph(...)")

    @classmethod
    def _make(cls, ir: Ir, name: str) -> Graph:
        self = object.__new__(cls)
        self._ir_, self._name = ir, name
        self._ops, self._inputs, self._outputs, self._call_sites = [], [], [], []
        self._tensors, self._taken, self._hooks, self._outlined = {}, {}, {}, None
        self._users, self._known, self._routed, self._scopes = {}, {}, {}, []
        self._gradient_is_written, self._written_gradients, self._changed_at = False, {}, 0
        return self

    # ---- identity -------------------------------------------------------------------------------
    @property
    def name(self) -> str:
        return self._name

    @property
    def id(self) -> str:
        """Identifier of the graph, unique in the Ir."""
        return self._name

    @property
    def ir(self) -> Ir:
        return self._ir_

    _ir = ir  # applications use the underscore name

    @property
    def main_graph(self) -> Graph:
        return self._ir_.main_graph

    @property
    def _name_prefix(self) -> str:
        return "" if self is self._ir_.main_graph else f"{self._name}/"

    # ---- contents -------------------------------------------------------------------------------
    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return tuple(self._inputs)

    @property
    def inputs_by_name(self) -> dict[str, Tensor]:
        return {t.name: t for t in self._inputs}

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        return tuple(self._outputs)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(self._tensors.values())

    @property
    def variables(self) -> tuple[Variable, ...]:
        return tuple(t for t in self._tensors.values() if isinstance(t, Variable))

    @property
    def _device_tensors(self) -> tuple[Variable | Shard, ...]:
        """Variables and shards whose values stay on the devices from run to run."""
        state = (t for t in self._tensors.values() if isinstance(t, (Variable, Shard)))
        return tuple(
            t for t in state if isinstance(t, Shard) or (t._remote is None and not t._sharded)
        )

    @property
    def constants(self) -> tuple[Constant, ...]:
        return tuple(t for t in self._tensors.values() if isinstance(t, Constant))

    @property
    def ops(self) -> tuple[Op, ...]:
        """Ops of the graph in execution order."""
        return tuple(self._ops)

    @property
    def called_graphs(self) -> tuple[Graph, ...]:
        """Returns the graphs that ops of this graph run, in order of first use."""
        return tuple(dict.fromkeys(g for op in self._ops for g in op.called_graphs()))

    @property
    def functional(self) -> Any:
        """Functional (SSA) form of the graph, which is scheduled and compiled."""
        return analyses.functionalize(self)

    def get_tensor(self, tensor_id: str) -> Tensor:
        """Returns the tensor with an id or name; raises ValueError if there is none."""
        name = tensor_id.removeprefix(self._name_prefix)
        if name not in self._tensors:
            raise ValueError(f"graph {self.id!r} has no tensor {tensor_id!r}")
        return self._tensors[name]

    def __contains__(self, value: object) -> bool:
        return isinstance(value, Tensor) and value._graph is self

    # ---- building -------------------------------------------------------------------------------
    def _register_tensor(self, tensor: Tensor, name: str | None) -> str:
        base = name or "t"
        check_type("tensor", "name", base, str)
        if self._scopes:
            base = "/".join([*self._scopes, base])
        unique, n = base, self._taken.get(base, 0)
        while unique in self._tensors:
            unique, n = f"{base}__t{n}", n + 1
        self._taken[base] = n
        self._tensors[unique] = tensor
        return unique

    def _add_input(self, spec: TensorSpec, name: str | None, by_ref: bool = False) -> Tensor:
        tensor: Tensor = Tensor._make(self, spec, name)
        tensor._by_ref = by_ref
        self._inputs.append(tensor)
        self._invalidate_analyses()
        return tensor

    def _add_output(self, tensor: Tensor) -> int:
        """Appends an output to the graph and its existing call sites; returns its index."""
        from popxl._ir.op import add_outputs

        if self is self.main_graph:
            raise ValueError("the main graph has no outputs: use ops.host_store")
        check_type("graph_output", "t", tensor, Tensor)
        if tensor not in self:
            raise ValueError(f"{tensor!r} cannot be an output of graph {self.id!r}: it belongs to "
                             f"graph {tensor._graph.id!r}")  # fmt: skip
        for site in self._call_sites:
            if any(region.kind == "branch" for region in regions(site)):
                raise SpecError(
                    f"graph {self.id!r} is a branch of a conditional at {site.location} and "
                    "cannot gain outputs any more"
                )
        self._outputs.append(tensor)
        self._invalidate_analyses()
        for site in self._call_sites:
            add_outputs(site, [tensor.spec], [tensor.name.rpartition("/")[2]])
        return len(self._outputs) - 1

    def _append_op(self, op: Op) -> None:
        self._ops.append(op)
        for graph in op.called_graphs():
            graph._call_sites.append(op)
        self._record_calls(op)
        context.get_current_context()._call_op_created_hooks(op)
        for fn in list(self._hooks.values()):
            fn(op)

    def _record_calls(self, op: Op) -> None:
        """Records this graph as a caller of the graphs that `op` runs."""
        for region in regions(op):
            region.graph._users[self] = None
        self._invalidate_analyses()

    def _remove_from_callers(self) -> None:
        """Removes this graph from the callers of the graphs that it calls."""
        for graph in {region.graph for op in self._ops for region in regions(op)}:
            graph._call_sites = [op for op in graph._call_sites if op.graph is not self]
            graph._users.pop(self, None)

    def _invalidate_analyses(self) -> None:
        """Invalidates the cached analyses of this graph and of its callers."""
        self._ir_._changes += 1
        self._changed_at = self._ir_._changes
        waiting = [self]
        while waiting:
            graph = waiting.pop()
            if graph._known:  # what is known of a graph rests on what is known of those it runs
                graph._known = {}
                waiting += graph._users

    def register_op_created_hook(self, fn: Callable[[Op], Any]) -> int:
        """Registers a hook `fn(op)` for each op created in this graph; returns its handle."""
        handle = max(self._hooks, default=0) + 1
        self._hooks[handle] = fn
        return handle

    def remove_op_created_hook(self, handle: int) -> None:
        self._hooks.pop(handle, None)

    # ---- Python ---------------------------------------------------------------------------------
    def __enter__(self) -> Graph:
        """Makes this the current graph.

        Raises:
            RuntimeError: the current graph belongs to another Ir.
        """
        current = context.get_current_context()
        if current._graphs and current.graph.ir is not self.ir:
            raise RuntimeError(
                f"graph {self.id!r} is of another Ir than the current graph {current.graph.id!r}: "
                "leave that one first"
            )
        current.push_graph(self)
        return self

    def __exit__(self, *exc: Any) -> None:
        context.get_current_context().pop_graph()
        _, error, trace = exc
        if isinstance(error, Exception) and trace is not None:
            context.add_location(error, trace)

    def __repr__(self) -> str:
        return f"Graph[id={self.id} name={self.name}]"

    def __str__(self) -> str:
        return analyses.format_graph(self)
