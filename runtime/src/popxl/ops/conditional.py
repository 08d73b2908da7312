"""Conditional: runs one of two graphs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from popxl import context, dtypes
from popxl._ir.op import Op
from popxl._ir.op_registry import define
from popxl._ir.regions import Region
from popxl.graph import Graph
from popxl.ops._emit import emit
from popxl.ops.call import CallSiteInfo, _check_index, gather_inputs, names_without_scopes
from popxl.tensor import Tensor, TensorSpec

# Inputs of the op: the condition, the inputs of the then-branch, the inputs of the else-branch.


def _branch_inputs(op: Op, then_branch: bool) -> range:
    split = 1 + len(op.attrs["then"]._inputs)
    return range(1, split) if then_branch else range(split, len(op.inputs))


def _infer(*specs: TensorSpec, then: Graph, otherwise: Graph) -> list[TensorSpec]:
    cond = specs[0]
    if cond.dtype is not dtypes.bool or math.prod(cond.shape) != 1:
        raise ValueError(
            f"the condition must be one bool, but is {cond.dtype.name}{list(cond.shape)}"
        )
    then_outputs, else_outputs = (
        [(t.shape, t.dtype) for t in g._outputs] for g in (then, otherwise)
    )
    if then_outputs != else_outputs:
        raise ValueError(
            f"the branches must return the same, but {then.id!r} returns {then_outputs} and "
            f"{otherwise.id!r} returns {else_outputs}"
        )
    return [t.spec for t in then._outputs]


def _branch_regions(op: Op) -> list[Region[Graph]]:
    graphs = {True: op.attrs["then"], False: op.attrs["otherwise"]}
    return [
        Region(g, tuple(_branch_inputs(op, then)), tuple(range(len(g._outputs))), kind="branch")
        for then, g in graphs.items()
    ]


def _grad(ctx: Any, op: Op, *grads: Tensor | None) -> Any:
    return ctx.branch_grad(op, grads)


CONDITIONAL = define(
    "conditional",
    infer=_infer,
    grad=_grad,
    regions=_branch_regions,
    result=lambda op: names_without_scopes(op.attrs["then"]._outputs),
)


class ConditionalSiteInfo(CallSiteInfo):
    """A conditional's site: maps tensors of the caller to those of its two branches and back."""

    @property
    def called_graph(self) -> tuple[Graph, Graph]:  # type: ignore[override]
        """The two branch graphs: (then, else)."""
        return self._op.attrs["then"], self._op.attrs["otherwise"]

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """Inputs: the condition, the then-branch's inputs, the else-branch's inputs."""
        return tuple(self._op.inputs)

    def _graph(self, then_branch: bool) -> Graph:
        return self.called_graph[0 if then_branch else 1]

    def graph_to_parent_input_index(self, idx: int, then_branch: bool = True) -> int:
        """Returns the caller's input index of input `idx` of a branch.

        Raises:
            IndexError: the branch has no such input.
        """
        _check_index(idx, self._graph(then_branch)._inputs, "input", self._graph(then_branch))
        return _branch_inputs(self._op, then_branch)[idx]

    def parent_to_graph_input_index(self, idx: int) -> int:
        """Returns the branch's input index of the caller's input `idx` (not the condition)."""
        return idx - _branch_inputs(self._op, self.is_parent_index_in_then_branch(idx))[0]

    def is_parent_index_in_then_branch(self, idx: int) -> bool:
        """True if the caller's input `idx` belongs to the then-branch.

        Raises:
            ValueError: it is the condition.
            IndexError: the conditional has no such input.
        """
        if idx == 0:
            raise ValueError("input 0 of a conditional is its condition and in neither branch")
        if not 0 < idx < len(self._op.inputs):
            raise IndexError(f"the conditional has {len(self._op.inputs)} inputs, no number {idx}")
        return idx in _branch_inputs(self._op, True)

    def graph_to_parent_output_index(self, idx: int, then_branch: bool = True) -> int:
        if not 0 <= idx < len(self._graph(then_branch)._outputs):
            raise IndexError(f"the branches have no output {idx}")
        return idx

    def parent_to_graph_output_index(self, idx: int, then_branch: bool = True) -> int:
        return self.graph_to_parent_output_index(idx, then_branch)

    def graph_to_parent(self, graph_tensor: Tensor) -> Tensor:
        for then in (True, False):
            graph = self._graph(then)
            if graph_tensor in graph._inputs:
                at = graph._inputs.index(graph_tensor)
                return self._op.inputs[self.graph_to_parent_input_index(at, then)]
            if graph_tensor in graph._outputs:
                return self._op.outputs[graph._outputs.index(graph_tensor)]
        raise ValueError(f"{graph_tensor!r} is no input or output of either branch")

    def parent_to_graph(self, parent_tensor: Tensor) -> Tensor:
        """Returns the branch tensor of a caller's tensor; searches the then-branch first."""
        if parent_tensor in self._op.inputs[1:]:
            idx = 1 + self._op.inputs[1:].index(parent_tensor)
            graph = self._graph(self.is_parent_index_in_then_branch(idx))
            return graph._inputs[self.parent_to_graph_input_index(idx)]
        if parent_tensor in self._op.outputs:
            return self._graph(True)._outputs[self._op.outputs.index(parent_tensor)]
        raise ValueError(f"{parent_tensor!r} is no input or output of the conditional's branches")

    def set_parent_input_modified(
        self, parent_tensor: Tensor, infer_modified_regions: bool = True
    ) -> None:
        super().set_parent_input_modified(parent_tensor, infer_modified_regions)


Inputs = Iterable[Tensor | Iterable[Tensor]] | None


def conditional(
    cond: Tensor,
    then_branch: Graph,
    else_branch: Graph,
    then_inputs: Inputs = None,
    else_inputs: Inputs = None,
    then_inputs_dict: Mapping[Tensor, Tensor] | None = None,
    else_inputs_dict: Mapping[Tensor, Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """Runs `then_branch` if `cond` is true, otherwise `else_branch`; returns its outputs.

    Args:
        cond: bool tensor of one element. With replicas it may differ between them only if the
            branches hold no collectives.
        then_inputs, else_inputs: inputs of the branches in order.
        then_inputs_dict, else_inputs_dict: inputs by the branch's input tensors.

    Raises:
        SpecError: `cond` is not one bool, or the branches return different shapes or dtypes.
        ValueError: wrong inputs of a branch.
    """
    return conditional_with_info(
        cond, then_branch, else_branch, then_inputs, else_inputs, then_inputs_dict,
        else_inputs_dict,
    ).outputs  # fmt: skip


def conditional_with_info(
    cond: Tensor,
    then_branch: Graph,
    else_branch: Graph,
    then_inputs: Inputs = None,
    else_inputs: Inputs = None,
    then_inputs_dict: Mapping[Tensor, Tensor] | None = None,
    else_inputs_dict: Mapping[Tensor, Tensor] | None = None,
    check_inputs: bool = True,
) -> ConditionalSiteInfo:
    """Adds a conditional like `conditional`, and returns information on its site."""
    then = gather_inputs(then_branch, then_inputs or (), then_inputs_dict, "conditional",
                         check_inputs)  # fmt: skip
    otherwise = gather_inputs(else_branch, else_inputs or (), else_inputs_dict, "conditional",
                              check_inputs)  # fmt: skip
    here = context.get_current_graph()
    emit(CONDITIONAL, [cond, *then, *otherwise], {"then": then_branch, "otherwise": else_branch})
    return ConditionalSiteInfo(here._ops[-1])
