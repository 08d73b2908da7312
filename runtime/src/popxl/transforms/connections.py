"""Records of the forward tensors that a gradient graph's inputs and outputs belong to."""

from __future__ import annotations

from enum import Enum
from typing import Any

from popxl.graph import Graph
from popxl.ops.call import CallSiteInfo
from popxl.tensor import Tensor
from popxl.transforms.gradient_ops import sum_gradients, tensors_with_max_gradient


class ExpectedConnectionType(Enum):
    """Kind of a gradient graph's input or output: a forward tensor, or its gradient."""

    Fwd = "Fwd"  # a tensor of the forward graph
    FwdGrad = "FwdGrad"  # the gradient of a tensor of the forward graph


class _ReadOnlyRecord:
    """Base of autodiff's read-only records, which only the library creates."""

    def __init__(self) -> None:
        raise TypeError(f"Cannot create {type(self).__name__} instances; autodiff makes them")

    @classmethod
    def _make(cls, *fields: Any) -> Any:
        self = object.__new__(cls)
        self.__dict__.update(zip(cls.__annotations__, fields, strict=True))
        return self


class ExpectedConnection(_ReadOnlyRecord):
    """Forward tensor, or its gradient, that a gradient graph's input or output corresponds to.

    Attributes:
        fwd_tensor: a tensor of the forward graph.
        connection_type: whether the tensor itself or its gradient is meant.
    """

    fwd_tensor: Tensor
    connection_type: ExpectedConnectionType

    def __repr__(self) -> str:
        return f"({self.connection_type.name}, {self.fwd_tensor!r})"


class GradGraphInfo(_ReadOnlyRecord):
    """A gradient graph, with the forward tensors that its inputs and outputs correspond to.

    Attributes:
        graph: the gradient graph.
        forward_graph: the forward graph.
        expected_inputs: what each input of the gradient graph must be given.
        expected_outputs: what each output of the gradient graph is the gradient of.
    """

    graph: Graph
    forward_graph: Graph
    expected_inputs: tuple[ExpectedConnection, ...]
    expected_outputs: tuple[ExpectedConnection, ...]

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """Forward tensors that the inputs of the gradient graph correspond to."""
        return tuple(c.fwd_tensor for c in self.expected_inputs)

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """Forward tensors whose gradients are the outputs of the gradient graph."""
        return tuple(c.fwd_tensor for c in self.expected_outputs)

    def inputs_dict(self, fwd_call_info: CallSiteInfo) -> dict[Tensor, Tensor]:
        """Returns the gradient-graph inputs that a call of the forward graph provides, with values.

        Use as `inputs_dict` of `ops.call`; the gradients remain as positional inputs.
        """
        return {
            self.graph.inputs[i]: fwd_call_info.graph_to_parent(c.fwd_tensor)
            for i, c in enumerate(self.expected_inputs)
            if c.connection_type is ExpectedConnectionType.Fwd
        }

    def fwd_graph_ins_to_grad_parent_outs(
        self, grad_call_info: CallSiteInfo
    ) -> dict[Tensor, Tensor]:
        """Maps tensors of the forward graph to their gradients, outputs of the gradient call."""
        return {t: grad_call_info.parent_output(i) for i, t in enumerate(self.outputs)}

    def fwd_parent_ins_to_grad_parent_outs(
        self, fwd_call_info: CallSiteInfo, grad_call_info: CallSiteInfo
    ) -> dict[Tensor, Tensor]:
        """Maps inputs of the forward call to their gradients, outputs of the gradient call.

        A tensor that the forward call was given several times gets the sum of the gradients, which
        this function appends to the graph of the gradient call.
        """
        by_input: dict[Tensor, dict[Tensor, Tensor]] = {}
        for t, g in self.fwd_graph_ins_to_grad_parent_outs(grad_call_info).items():
            by_input.setdefault(fwd_call_info.graph_to_parent(t), {})[t] = g
        observed = tensors_with_max_gradient(self.forward_graph)
        with grad_call_info._op.graph:
            return {
                mine: sum_gradients(list(terms.values()), is_maximum=not observed.isdisjoint(terms))
                for mine, terms in by_input.items()
            }

    def __repr__(self) -> str:
        return (
            f"GradGraphInfo[\n  graph={self.graph!r}\n"
            f"  expected_inputs={list(self.expected_inputs)}\n"
            f"  expected_outputs={list(self.expected_outputs)}\n]"
        )
