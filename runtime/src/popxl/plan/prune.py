"""Leaving out what nobody uses, as XLA does: nodes, and what loops carry for nothing."""

from __future__ import annotations

from collections.abc import Iterable

from popxl.plan.values import Block, Node, Value, captured

_KEPT = frozenset(("store", "effect"))


def prune(block: Block, wanted: Iterable[Value] | None = None) -> None:
    """Remove the nodes of `block`, and of the bodies in it, on which nothing depends.

    Args:
        wanted: values that are used afterwards; default: all outputs of the block.
    """
    used = set(block.outputs if wanted is None else wanted)
    kept: list[Node] = []
    for node in reversed(block.nodes):
        if not _acts(node) and used.isdisjoint(node.outputs):
            continue
        _prune_bodies(node, used)
        kept.append(node)
        used.update(node.inputs)
        used.update(captured(node))
    block.nodes[:] = reversed(kept)


def _acts(node: Node) -> bool:
    """Whether a node changes state, itself or in its bodies."""
    return node.kind in _KEPT or any(_acts(n) for body in node.bodies for n in body.nodes)


def _prune_bodies(node: Node, used: set[Value]) -> None:
    if node.kind == "loop" and node.carried:
        _prune_loop(node, used)
    elif node.kind == "branch":
        keep = [i for i, v in enumerate(node.outputs) if v in used]
        node.outputs = [node.outputs[i] for i in keep]
        for body in node.bodies:
            body.outputs = [body.outputs[i] for i in keep if i < len(body.outputs)]
            prune(body)
    else:
        for body in node.bodies:
            prune(body)


def _prune_loop(node: Node, used: set[Value]) -> None:
    """Drop carried values that are neither used after the loop nor needed by what is."""
    (body,) = node.bodies
    keep = {i for i in range(len(node.carried)) if node.outputs[i] in used}
    while True:
        needed = _needed(body, {body.outputs[i] for i in keep})
        more = {i for i, v in enumerate(node.carried) if v in needed} - keep
        if not more:
            break
        keep |= more
    order = sorted(keep)
    node.inputs = [node.inputs[i] for i in order] + node.inputs[len(node.carried) :]
    node.outputs = [node.outputs[i] for i in order]
    node.carried = tuple(node.carried[i] for i in order)
    body.outputs = [body.outputs[i] for i in order]
    prune(body)


def _needed(body: Block, wanted: set[Value]) -> set[Value]:
    """Values that the body reads to do what it does and to make `wanted`."""
    used = set(wanted)
    for node in reversed(body.nodes):
        if _acts(node) or not used.isdisjoint(node.outputs):
            used.update(node.inputs)
            used.update(captured(node))
    return used
