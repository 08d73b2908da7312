"""Computing before a loop what is the same in each iteration, as XLA does.

The rules are those of while_loop_invariant_code_motion.cc.
"""

from __future__ import annotations

from popxl.plan.values import Block, Node, Value

# What XLA moves only together with something that is computed from it.
_NOT_ALONE = frozenset(
    "broadcast_in_dim broadcast iota reshape squeeze expand_dims rev slice transpose".split()
)


def hoist(block: Block) -> None:
    """Move nodes out of the loops in `block`, innermost loops first."""
    nodes: list[Node] = []
    for node in block.nodes:
        for body in node.bodies:
            hoist(body)
        if node.name == "repeat":  # gradients of loops take other values in each iteration
            nodes += _take_invariant(node.bodies[0], set(node.carried))
        nodes.append(node)
    block.nodes[:] = nodes


def _take_invariant(body: Block, varying: set[Value]) -> list[Node]:
    """Remove from a body what depends on nothing that varies, and is worth it."""
    same: list[Node] = []
    for node in body.nodes:
        if _is_pure(node) and varying.isdisjoint(node.inputs):
            same.append(node)
        else:
            varying.update(node.outputs)
    moved: set[Node] = set()
    wanted: set[Value] = set()
    for node in reversed(same):
        alone = node.name not in _NOT_ALONE and any(v.elements > 1 for v in node.outputs)
        if alone or not wanted.isdisjoint(node.outputs):
            moved.add(node)
            wanted.update(node.inputs)
    body.nodes[:] = [node for node in body.nodes if node not in moved]
    return [node for node in same if node in moved]


def _is_pure(node: Node) -> bool:
    """Whether a node makes the same of the same; a load does of a stream with one entry."""
    return node.kind == "primitive" or (node.kind == "load" and node.facts.get("whole", False))
