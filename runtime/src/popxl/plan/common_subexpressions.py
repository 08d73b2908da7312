"""Elimination of common subexpressions in a flat function, as XLA does it."""

from __future__ import annotations

from typing import Any

from popxl.plan.flat_jaxpr import FlatFunction, PrimitiveNode, PrimitiveValue
from popxl.plan.primitives import MATERIALISED, lowering_of


def merge_equal_nodes(flat: FlatFunction) -> None:
    """Drops primitives that compute the same elements or sums again, also in loops and branches."""
    first_nodes: dict[Any, PrimitiveNode] = {}
    same: dict[PrimitiveValue, PrimitiveValue] = {}
    nodes, flat.nodes = flat.nodes, []
    for node in nodes:
        node.atoms = _replace(node.atoms, same)
        for body in (*(body for body, _ in node.bodies), *node.branches):
            merge_equal_nodes(body)
        first = first_nodes.setdefault(_computation_key(node), node)
        if first is node:
            flat.nodes.append(node)
        else:
            same.update(zip(node.outputs, first.outputs, strict=True))
    flat.results = _replace(flat.results, same)


def _replace(atoms: list[Any], same: dict[PrimitiveValue, PrimitiveValue]) -> list[Any]:
    return [same.get(a, a) if isinstance(a, PrimitiveValue) else a for a in atoms]


def _computation_key(node: PrimitiveNode) -> Any:
    """Returns what equal computations share; the node itself if XLA keeps it apart."""
    if lowering_of(node.name) == "kernel" or node.name in MATERIALISED or node.has_bodies:
        return node
    atoms = (a if isinstance(a, PrimitiveValue) else (a.aval, str(a.val)) for a in node.atoms)
    return node.name, str(node.params), *atoms
