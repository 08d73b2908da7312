"""Computing the same thing once, as XLA does (hlo_cse.cc).

A gradient often begins by computing again what its forward op has computed, and a view is computed
wherever it is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from popxl.plan.values import Block, Node, Value


def merge(block: Block, known: Mapping[Value, Value] | None = None) -> None:
    """Remove nodes of `block`, and of the bodies in it, that do what an earlier one of it does.

    Args:
        known: values from outside that were removed, and those that are read instead.
    """
    same = dict(known or {})
    seen: dict[Any, Node] = {}
    kept = []
    for node in block.nodes:
        node.inputs = [same.get(v, v) for v in node.inputs]
        for body in node.bodies:
            merge(body, same)
        meaning = node.facts.get("meaning")
        first = node if meaning is None else seen.setdefault((meaning, *node.inputs), node)
        if first is node:
            kept.append(node)
        else:
            same.update(zip(node.outputs, first.outputs, strict=True))
    block.nodes[:] = kept
    block.outputs = [same.get(v, v) for v in block.outputs]
