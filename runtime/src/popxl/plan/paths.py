"""Ways from one node of a block to another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from popxl.plan.storage import Storage
from popxl.plan.values import Node, captured


class Paths:
    """The ways that values take through the nodes of a block.

    Attributes:
        sources: of each node, those that make what it reads.
    """

    def __init__(self, nodes: Sequence[Node], storage: Storage) -> None:
        """Args: `nodes`: in an order in which they can run."""
        self._nodes = nodes
        self._position = {node: at for at, node in enumerate(nodes)}
        self.sources: dict[Node, list[Node]] = {}
        self._before: list[int] = []  # positions that a node depends on, its own too, as bits
        for at, node in enumerate(nodes):
            read = [storage.of(v).producer for v in (*node.inputs, *captured(node))]
            found = [n for n in dict.fromkeys(read) if n is not None and n in self._position]
            self.sources[node] = found
            bits = 1 << at
            for source in found:
                bits |= self._before[self._position[source]]
            self._before.append(bits)

    def between(self, first: Node, last: Node) -> Iterator[tuple[Node, Node]]:
        """The steps of all ways from `first` to `last`: a node, and one that reads its value."""
        start, end = self._position[first], self._position[last]
        on_the_way = {
            self._nodes[at]
            for at in range(start, end + 1)
            if self._before[end] >> at & 1 and self._before[at] >> start & 1
        }
        for node in on_the_way - {first}:
            for source in self.sources[node]:
                if source in on_the_way:
                    yield source, node
