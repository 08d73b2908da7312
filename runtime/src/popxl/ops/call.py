"""Calls of graphs, and information on call sites."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from popxl import context
from popxl._analysis.reference_overlap import check_reference_overlap
from popxl._ir.argument_checks import check_type
from popxl._ir.op import Op
from popxl._ir.op_registry import define
from popxl._ir.regions import Region
from popxl.errors import SpecError
from popxl.graph import Graph
from popxl.ops._emit import emit
from popxl.tensor import Tensor, TensorLike, TensorSpec, constant


# ---- the op -------------------------------------------------------------------------------------
def called_output_specs(*specs: TensorSpec, graph: Graph, **_: Any) -> list[TensorSpec]:
    """Returns the specs of a called graph's outputs (the shape rule of calls)."""
    return [t.spec for t in graph._outputs]


def called_regions(op: Op) -> list[Region[Graph]]:
    """Returns the graphs that a call or repeat op runs, with their input mappings."""
    graph = op.attrs["graph"]
    ins, outs = range(len(graph._inputs)), range(len(graph._outputs))
    carried = tuple((k, k) for k in range(op.attrs.get("carried", 0)))
    return [Region(graph, tuple(ins), tuple(outs), carried, op.attrs.get("count", 1))]


def called_output_names(op: Op) -> list[str]:
    """Returns the names of a called graph's outputs, without scopes (the name rule of calls)."""
    return names_without_scopes(op.attrs["graph"]._outputs)


def names_without_scopes(tensors: Iterable[Tensor]) -> list[str]:
    """Returns the names of tensors without their scopes."""
    return [t.name.rpartition("/")[2] for t in tensors]


def _call_grad(ctx: Any, op: Op, *grads: Tensor | None) -> Sequence[Tensor | None]:
    return ctx.call_grad(op, grads)


CALL = define(
    "call",
    infer=called_output_specs,
    grad=_call_grad,
    regions=called_regions,
    result=called_output_names,
)


# ---- call sites ---------------------------------------------------------------------------------
class CallSiteInfo:
    """A call or repeat site: maps tensors of the caller to those of the called graph and back."""

    def __init__(self, subgraph_op: Op) -> None:
        self._op = subgraph_op

    @property
    def called_graph(self) -> Graph:
        return self._op.attrs["graph"]

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """Input tensors of the caller, in the order of the graph's inputs."""
        return tuple(self._op.inputs)

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """Output tensors of the caller, in the order of the graph's outputs."""
        return tuple(self._op.outputs)

    def graph_to_parent_input_index(self, idx: int) -> int:
        """Returns the caller's input index of the graph's input `idx`."""
        _check_index(idx, self.called_graph._inputs, "input", self.called_graph)
        return idx

    def parent_to_graph_input_index(self, idx: int) -> int:
        """Returns the graph's input index of the caller's input `idx`."""
        return self.graph_to_parent_input_index(idx)

    def graph_to_parent_output_index(self, idx: int) -> int:
        """Returns the caller's output index of the graph's output `idx`."""
        _check_index(idx, self.called_graph._outputs, "output", self.called_graph)
        return idx

    def parent_to_graph_output_index(self, idx: int) -> int:
        """Returns the graph's output index of the caller's output `idx`."""
        return self.graph_to_parent_output_index(idx)

    def graph_to_parent(self, graph_tensor: Tensor) -> Tensor:
        """Returns the caller's tensor of an input or output of the called graph."""
        graph = self.called_graph
        if graph_tensor in graph._inputs:
            return self._op.inputs[graph._inputs.index(graph_tensor)]
        if graph_tensor in graph._outputs:
            return self._op.outputs[graph._outputs.index(graph_tensor)]
        raise ValueError(f"{graph_tensor!r} is no input or output of graph {graph.id!r}")

    def parent_to_graph(self, parent_tensor: Tensor) -> Tensor:
        """Returns the called graph's input or output of a tensor of the caller."""
        if parent_tensor in self._op.inputs:
            return self.called_graph._inputs[self._op.inputs.index(parent_tensor)]
        if parent_tensor in self._op.outputs:
            return self.called_graph._outputs[self._op.outputs.index(parent_tensor)]
        raise ValueError(
            f"{parent_tensor!r} is no input or output of the call of {self.called_graph.id!r}"
        )

    def parent_input(self, idx: int) -> Tensor:
        """Returns the caller's input tensor `idx`."""
        return self._op.inputs[idx]

    def parent_output(self, idx: int) -> Tensor:
        """Returns the caller's output tensor `idx`."""
        return self._op.outputs[idx]

    def set_parent_input_modified(
        self, parent_tensor: Tensor, infer_modified_regions: bool = False
    ) -> None:
        """Makes the called graph's changes of this input change the caller's `parent_tensor` too.

        Raises:
            ValueError: it is no input of the call, or the graph changes it as two inputs.
        """
        if parent_tensor not in self._op.inputs:
            raise ValueError(f"{parent_tensor!r} is no input of this call")
        op, before = self._op, self._op.site_modified
        op.site_modified = before | {i for i, t in enumerate(op.inputs) if t is parent_tensor}
        op.graph._invalidate_analyses()
        try:
            check_reference_overlap(op)
        except ValueError:
            op.site_modified = before
            op.graph._invalidate_analyses()
            raise


def _check_index(idx: int, tensors: Sequence[Tensor], kind: str, graph: Graph) -> None:
    if not 0 <= idx < len(tensors):
        raise IndexError(f"graph {graph.id!r} has {len(tensors)} {kind}s, but index {idx} was used")


# ---- inputs -------------------------------------------------------------------------------------
def gather_inputs(
    graph: Graph,
    inputs: Iterable[TensorLike | Iterable[TensorLike]],
    inputs_dict: Mapping[Tensor, TensorLike] | None,
    op_name: str = "call",
    check_inputs: bool = True,
) -> list[Tensor]:
    """Returns the caller's tensors of a call in the order of the called graph's inputs.

    Positional inputs (lists are flattened) fill the graph's inputs that `inputs_dict` leaves, in
    order. Host data becomes constants.

    Raises:
        TypeError: an input can be no tensor of the dtype of the graph's.
        ValueError: too many or too few inputs, a wrong key, or a graph that cannot be called here.
        SpecError: an input does not fit the graph's.
    """
    _check_callable(graph, op_name)
    check_type(op_name, "inputs_dict", inputs_dict or {}, Mapping)
    given = dict(inputs_dict or {})
    for key in given:
        if key not in graph._inputs:
            raise ValueError(
                f"{op_name}: {key!r} is no input of graph {graph.id!r}: use its tensors, as in "
                "`graph.inputs_by_name`"
            )
    positional = list(_flatten(inputs))
    free = [t for t in graph._inputs if t not in given]
    if len(positional) > len(free):
        raise ValueError(
            f"{op_name}: graph {graph.id!r} takes {len(free)} positional inputs, but got "
            f"{len(positional)}"
        )
    if len(positional) < len(free):
        missing = [t.name for t in free[len(positional) :]]
        raise ValueError(f"{op_name}: graph {graph.id!r} lacks values for its inputs {missing}")
    given.update(zip(free, positional, strict=True))
    tensors = [_as_tensor(given[t], t, op_name) for t in graph._inputs]
    if check_inputs:
        _check_specs(graph, tensors, op_name)
    return tensors


def _check_callable(graph: Graph, op_name: str) -> None:
    check_type(op_name, "graph", graph, Graph)
    here = context.get_current_graph()
    if graph.ir is not here.ir:
        raise ValueError(
            f"{op_name}: graph {graph.id!r} belongs to another Ir than graph {here.id!r}: create "
            "it in this one"
        )
    if graph in (here, here.ir.main_graph):
        raise ValueError(f"{op_name}: graph {graph.id!r} cannot be used inside itself")


def _flatten(inputs: Iterable[Any]) -> Iterable[Any]:
    for item in inputs:
        if isinstance(item, (list, tuple)) and any(isinstance(x, Tensor) for x in item):
            yield from item
        else:
            yield item


def _as_tensor(value: TensorLike, graph_input: Tensor, op_name: str) -> Tensor:
    if isinstance(value, Tensor):
        return value
    try:
        return constant(value, graph_input.dtype)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{op_name} at {context.get_source_location()}: input {graph_input.name!r} must be a "
            f"tensor or data of {graph_input.dtype.name}, but is {value!r}"
        ) from error


def _check_specs(graph: Graph, tensors: Sequence[Tensor], op_name: str) -> None:
    for given, wanted in zip(tensors, graph._inputs, strict=True):
        if (given.shape, given.dtype) != (wanted.shape, wanted.dtype):
            from popxl._analysis.printing import format_spec

            raise SpecError(
                f"{op_name} at {context.get_source_location()}: input {wanted.name!r} of graph "
                f"{graph.id!r} is {format_spec(wanted.spec)}, but {given.id!r} is "
                f"{format_spec(given.spec)}"
            )


# ---- public functions ---------------------------------------------------------------------------
def call(
    graph: Graph,
    *inputs: TensorLike | Iterable[TensorLike],
    inputs_dict: Mapping[Tensor, TensorLike] | None = None,
) -> tuple[Tensor, ...]:
    """Adds a call of `graph` to the current graph and returns the call's outputs.

    Args:
        inputs: tensors (or host data) for the graph's inputs in order; lists are flattened.
        inputs_dict: values for some inputs, by the graph's input tensors.

    Raises:
        ValueError: wrong number of inputs, or tensors of another graph.
        SpecError: an input's shape or dtype differs from the graph's.
    """
    return call_with_info(graph, *inputs, inputs_dict=inputs_dict).outputs


def call_with_info(
    graph: Graph,
    *inputs: TensorLike | Iterable[TensorLike],
    inputs_dict: Mapping[Tensor, TensorLike] | None = None,
    check_inputs: bool = True,
) -> CallSiteInfo:
    """Adds a call like `call`, and returns information on the call site."""
    here = context.get_current_graph()
    tensors = gather_inputs(graph, inputs, inputs_dict, "call", check_inputs)
    emit(CALL, tensors, {"graph": graph})
    return CallSiteInfo(here._ops[-1])
