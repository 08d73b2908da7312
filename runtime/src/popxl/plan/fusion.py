"""Which values exist in memory: XLA computes most elementwise ones where they are used.

The rules are those of XLA's CPU backend (cpu_instruction_fusion.cc, instruction_fusion.cc), which
fuses least; other backends fuse at least as much. A value is computed where it is used if every use
can compute it element by element, and if that repeats nothing expensive.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from popxl.plan.fusible import (
    is_expensive,
    is_loop,
    is_repeated,
    is_unary,
    reads_again,
    takes_in,
)
from popxl.plan.paths import Paths
from popxl.plan.storage import Storage
from popxl.plan.values import Block, Node, Value, captured

RENAMES = frozenset("reshape squeeze expand_dims copy stop_gradient device_put copy_p".split())
BARRIER = "optimization_barrier"


@dataclass(eq=False)
class Kernel:
    """What XLA runs as one step: a node, and those that are computed inside it.

    Attributes:
        reads: values in memory that it reads.
        nodes: all its nodes; the last is the one whose outputs are in memory.
    """

    root: Node
    reads: list[Value] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)

    @property
    def part(self) -> str:
        """The part it counts for: that of its root, or of something computed inside."""
        if self.root.part or self.root.kind != "primitive":
            return self.root.part
        return next((n.part for n in self.nodes if n.part), "")


def kernels_of(block: Block, storage: Storage) -> list[Kernel]:
    """The kernels of a block in order, bodies not included."""
    nodes = _without_renames(block, storage)
    users: dict[Value, list[Node]] = defaultdict(list)
    for node in nodes:
        for value in {storage.of(v) for v in (*node.inputs, *captured(node))}:
            users[value].append(node)
    held = set(map(storage.of, _held(block)))
    inside = _fused(nodes, users, {*held, *map(storage.of, block.outputs)}, storage)
    again = {n for n in nodes if n not in inside and is_repeated(n) and n.outputs[0] not in held}
    return [_kernel(node, inside, again, storage) for node in nodes if node not in inside]


def _held(block: Block) -> list[Value]:
    """Values that the program asks XLA to make before it goes on."""
    barriers = (node for node in block.nodes if node.name == BARRIER)
    return [value for node in barriers for value in node.inputs]


def _without_renames(block: Block, storage: Storage) -> list[Node]:
    """The nodes that do something; reshapes and the like give memory another name."""
    products: dict[Value, bool] = defaultdict(lambda: True)
    for node in block.nodes:
        for value in (*node.inputs, *captured(node)):
            products[value] &= node.name == "dot_general"
    products.update((v, False) for v in block.outputs)
    kept = []
    for node in block.nodes:
        if node.kind == "primitive" and node.inputs and _is_rename(node, products, storage):
            for value, source in zip(node.outputs, node.inputs, strict=False):
                storage.rename(value, source)
        else:
            kept.append(node)
    return kept


def _is_rename(node: Node, products: dict[Value, bool], storage: Storage) -> bool:
    """Whether a node leaves elements where they are, or only turns matrices for a product, which
    reads them either way. XLA makes one of two transpositions in a row, so they are no turn."""
    if node.name != "transpose":
        return node.name in RENAMES or node.name == BARRIER
    order = node.facts["permutation"]
    turned = (*range(len(order) - 2), len(order) - 1, len(order) - 2)
    maker = storage.of(node.inputs[0]).producer
    again = maker is not None and maker.name == "transpose"
    return order == turned and products[node.outputs[0]] and not again


def _fused(
    nodes: list[Node], users: dict[Value, list[Node]], leaving: set[Value], storage: Storage
) -> set[Node]:
    """The nodes that are computed only where their values are used.

    A node that reads much is computed in several places only if it could be in all of them, those
    included that read its value by way of others.
    """
    inside = {node for node in nodes if _is_fused(node, users, leaving)}
    paths = Paths(nodes, storage)
    for node in nodes:
        for source in paths.sources[node]:
            several = source in inside and len(users[source.outputs[0]]) > 1
            if several and not is_unary(source):
                steps = paths.between(source, node)
                if not all(a in inside or (is_repeated(a) and takes_in(b)) for a, b in steps):
                    inside.discard(source)
    return inside


def _is_fused(node: Node, users: dict[Value, list[Node]], leaving: set[Value]) -> bool:
    if not is_loop(node) or node.outputs[0] in leaving:
        return False
    readers = users[node.outputs[0]]
    if is_expensive(node) and (len(readers) > 1 or reads_again(readers[0])):
        return False
    return bool(readers) and all(map(takes_in, readers))


def _kernel(root: Node, inside: set[Node], again: set[Node], storage: Storage) -> Kernel:
    """Collect what is computed inside `root`."""
    kernel, seen = Kernel(root), {root}
    reads: dict[Value, None] = {}

    def visit(node: Node) -> None:
        for value in (*node.inputs, *captured(node)):
            source = storage.of(value)
            maker = source.producer
            if maker is None or not (maker in inside or (maker in again and takes_in(node))):
                reads[source] = None
            elif maker not in seen:
                seen.add(maker)
                visit(maker)
        kernel.nodes.append(node)

    visit(root)
    kernel.reads = list(reads)
    return kernel
