"""Check of by-reference arguments: tensors that a called graph modifies must not overlap."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from popxl._analysis.alias_analysis import AliasAnalysis, element_indices
from popxl._analysis.functionalization import functionalize
from popxl._ir.regions import Region, regions

if TYPE_CHECKING:
    from popxl._ir.op import Op
    from popxl.graph import Graph
    from popxl.tensor import Tensor


def modified_call_inputs(op: Op, region: Region[Graph]) -> set[int]:
    """Returns the indices of call inputs whose tensors the callee modifies in the caller too."""
    references = _writable_inputs(op, region)
    return references and references.intersection(functionalize(region.graph).changed)


def _writable_inputs(op: Op, region: Region[Graph]) -> set[int]:
    """Returns the indices of callee inputs whose modifications reach the caller."""
    if region.kind == "derivative":
        return set()
    return {i for i in range(len(region.inputs)) if region.writes_back(op, i)}


def check_reference_overlap(op: Op) -> None:
    """Raises if tensors that are passed by reference and that the callee modifies overlap.

    Raises:
        ValueError: two do, so that one of the changes would be lost.
    """
    for region in regions(op):
        if len(_writable_inputs(op, region)) > 1 and (changed := modified_call_inputs(op, region)):
            _check_disjoint(op, region, changed)


def _check_disjoint(op: Op, region: Region[Graph], changed: set[int]) -> None:
    graph, views = region.graph, AliasAnalysis()
    uses: dict[Tensor, list[int]] = {}
    for i, inner in enumerate(graph._inputs):
        if inner._by_ref or i in changed:
            for owner in views.owners(op.inputs[region.op_input_index(i)]):
                uses.setdefault(owner, []).append(i)
    for owner, indices in uses.items():
        for i, k in combinations(indices, 2):
            parts = [op.inputs[region.op_input_index(j)] for j in (i, k)]
            if not changed.isdisjoint((i, k)) and _views_overlap(views, owner, parts):
                names = f"{graph._inputs[i].name!r} and {graph._inputs[k].name!r}"
                raise ValueError(
                    f"{op.name} at {op.location} passes {owner.id!r} as two references, {names} of "
                    f"graph {graph.id!r}, which changes it: pass it once, or parts of it that do "
                    "not overlap"
                )


def _views_overlap(views: AliasAnalysis, owner: Tensor, view_tensors: list[Tensor]) -> bool:
    """True if two views share an element of the tensor `owner`, whose storage they read."""

    def elements_in_owner(view: Tensor) -> np.ndarray:
        numbers = element_indices(view)
        return numbers if view is owner else np.full_like(numbers, -1)

    a, b = (views.evaluate_view(views.inplace_root(t), elements_in_owner) for t in view_tensors)
    return np.intersect1d(a[a >= 0], b[b >= 0]).size > 0
