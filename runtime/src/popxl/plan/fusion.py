"""Which values exist in memory: XLA computes most elementwise ones where they are used.

The rules are those of XLA's CPU backend (cpu_instruction_fusion.cc, instruction_fusion.cc), which
fuses least; other backends fuse at least as much. A value is computed where it is used if every use
can compute it element by element, and if that repeats nothing expensive.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from popxl.plan.values import Block, Node, Value, captured

RENAMES = frozenset("reshape squeeze expand_dims copy stop_gradient device_put copy_p".split())
BARRIER = "optimization_barrier"
_LIBRARY = frozenset(
    """dot_general conv_general_dilated sort scatter scatter_add scatter-add scatter_mul top_k
    cumsum cumprod cummax cummin while scan cond random_bits threefry2x32 random_seed random_wrap
    random_unwrap random_fold_in reduce_window_max reduce_window_sum argmax argmin
    rng_bit_generator custom_call pallas_call concatenate""".split()
)
_EXPENSIVE = frozenset(
    "exp exp2 expm1 log log1p logistic pow rsqrt sqrt cbrt tanh tan sin cos erf erfc erf_inv "
    "atan2".split()
)
_REPEATS = frozenset(("broadcast_in_dim", "broadcast", "gather"))  # read elements several times
_REDUCTIONS = frozenset("reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or".split())


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


class Storage:
    """Which values are in memory, and under which other value's name they are there."""

    def __init__(self) -> None:
        self._same: dict[Value, Value] = {}

    def rename(self, value: Value, source: Value) -> None:
        self._same[value] = source

    def of(self, value: Value) -> Value:
        """The value whose memory `value` is in."""
        while value in self._same:
            value = self._same[value]
        return value


def kernels_of(block: Block, storage: Storage) -> list[Kernel]:
    """The kernels of a block in order, bodies not included."""
    nodes = _without_renames(block, storage)
    users: dict[Value, list[Node]] = defaultdict(list)
    for node in nodes:
        for value in {storage.of(v) for v in (*node.inputs, *captured(node))}:
            users[value].append(node)
    leaving = {storage.of(v) for v in (*block.outputs, *_held(block))}
    inside = {node for node in nodes if _is_fused(node, users, leaving)}
    again = {node for node in nodes if node not in inside and _is_repeated(node)}
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
        if node.kind == "primitive" and node.inputs and _is_rename(node, products):
            for value, source in zip(node.outputs, node.inputs, strict=False):
                storage.rename(value, source)
        else:
            kept.append(node)
    return kept


def _is_rename(node: Node, products: dict[Value, bool]) -> bool:
    """Whether a node leaves elements where they are, or only turns matrices for a product, which
    reads them either way."""
    if node.name != "transpose":
        return node.name in RENAMES or node.name == BARRIER
    order = node.facts["permutation"]
    turned = (*range(len(order) - 2), len(order) - 1, len(order) - 2)
    return order == turned and products[node.outputs[0]]


def _is_fused(node: Node, users: dict[Value, list[Node]], leaving: set[Value]) -> bool:
    if not _is_loop(node):
        return False
    (value,) = node.outputs
    readers = users[value]
    if value in leaving or (
        node.name in _EXPENSIVE and (len(readers) > 1 or readers[0].name in _REPEATS)
    ):
        return False
    return bool(readers) and all(map(_takes_in, readers))


def _is_repeated(node: Node) -> bool:
    """Whether a value that is in memory is computed again where that can be done.

    XLA does so if it is cheap and reads at most one array as large as itself.
    """
    if not _is_loop(node) or node.name in _EXPENSIVE or node.name in _REDUCTIONS:
        return False
    size = node.outputs[0].elements
    return sum(v.elements >= size for v in node.inputs) <= 1


def _is_loop(node: Node) -> bool:
    """Whether a node computes its one output element by element."""
    if node.kind != "primitive" or node.name in _LIBRARY or len(node.outputs) != 1:
        return False
    return node.name not in _REDUCTIONS or _along_rows(node)


def _takes_in(reader: Node) -> bool:
    """Whether a node computes its inputs element by element."""
    return reader.kind == "store" or _is_loop(reader)


def _along_rows(node: Node) -> bool:
    """Whether a reduction is over the last axis; XLA on CPU keeps others to themselves."""
    rank = len(node.inputs[0].shape)
    return rank - 1 in node.facts.get("axes", ())


def _kernel(root: Node, inside: set[Node], again: set[Node], storage: Storage) -> Kernel:
    """Collect what is computed inside `root`."""
    kernel, seen = Kernel(root), {root}
    reads: dict[Value, None] = {}

    def visit(node: Node) -> None:
        for value in (*node.inputs, *captured(node)):
            source = storage.of(value)
            maker = source.producer
            if maker is None or not (maker in inside or (maker in again and _takes_in(node))):
                reads[source] = None
            elif maker not in seen:
                seen.add(maker)
                visit(maker)
        kernel.nodes.append(node)

    visit(root)
    kernel.reads = list(reads)
    return kernel
